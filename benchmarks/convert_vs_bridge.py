"""Our converters beside Megatron-Bridge's import and export on a CPU: time, processor time and peak memory.

    python -m benchmarks.convert_vs_bridge [--sizes 1 3 7] [--repeat 3] [--scratch DIR] [--output FILE.md]

The models have Qwen3-1.7B's shapes, tied embeddings and random BF16 weights; only the number of layers
varies. Every conversion runs in a process of its own, Bridge's in the environment of ``make venv-nemo-rl``,
and each repetition runs all of them one after the other. Bridge is called as its own CPU command calls it
(scripts/conversion/cpu_backend.py): `AutoBridge.import_ckpt` and `export_ckpt`. It needs CUDA and Transformer
Engine, so a rehearsal's hooks stand in for them: megatron-core's own layers hold the same weights.
"""

import argparse
import importlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peak_memory import Usage, measure

# `convert_models` and the converters are imported inside functions: the process that runs Bridge loads this
# file, too, and their import must not count as Bridge's start-up.

ROOT = Path(__file__).parents[1]
BRIDGE_PYTHON = ROOT / ".venv-nemo-rl" / "bin" / "python"
OURS = "nemo-grpo"
BRIDGE = "Megatron-Bridge"
CONVERTERS = (OURS, BRIDGE)
START = "start-up alone"
"""A process that imports its converter and converts nothing."""
IMPORT = "hf-to-megatron"
EXPORT = "megatron-to-hf"
NUM_WORKERS = 2
DEEPSEEK_V3: dict[str, object] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "vocab_size": 129280,
    "num_hidden_layers": 61,
}
"""DeepSeek-V3's sizes where they differ from Moonlight's."""


class Run(NamedTuple):
    """One conversion of one model by one converter.

    Attributes:
        size: bytes of the model's files.
        direction: `START`, `IMPORT` or `EXPORT`.
        converter: one of `CONVERTERS`.
    """

    size: int
    direction: str
    converter: str


def convert_with_bridge(direction: str, hf: str, checkpoint: str, exported: str) -> None:
    """Run a conversion of Megatron-Bridge in this process, or only its imports."""
    sys.path.append(str(ROOT / "nemo_grpo" / "rehearsal" / "site"))
    importlib.import_module("rehearsal_hooks").install()
    importlib.import_module("megatron.core")
    importlib.import_module("nemo_grpo.rehearsal.megatron").prepare()
    provider = importlib.import_module("megatron.bridge.models.gpt_provider").GPTModelProvider
    finalize = provider.finalize

    def finalize_without_apex(self: Any) -> None:
        # Bridge's provider asks for APEX's kernel, which needs CUDA, unless a training recipe says otherwise.
        self.gradient_accumulation_fusion = False
        finalize(self)

    provider.finalize = finalize_without_apex
    auto_bridge = importlib.import_module("megatron.bridge").AutoBridge
    if direction == IMPORT:
        bfloat16 = importlib.import_module("torch").bfloat16
        auto_bridge.import_ckpt(hf, checkpoint, torch_dtype=bfloat16, device_map="cpu")
    elif direction == EXPORT:
        auto_bridge.from_hf_pretrained(hf).export_ckpt(checkpoint, exported, show_progress=False, strict=True)


class Contest:
    """All conversions of one model.

    Attributes:
        bridge_python: interpreter of an environment that has Megatron-Bridge.
        hf: the model's folder.
        checkpoints: converter -> the Megatron checkpoint that it writes.
        exported: converter -> the Hugging Face folder that it makes of its own checkpoint.
        size: bytes of the model's files.
    """

    def __init__(self, scratch: Path, num_gigabytes: float, bridge_python: Path) -> None:
        """Write the model with random weights, and a tokenizer, which Bridge demands."""
        from benchmarks.convert_models import make_model, num_bytes, save_tokenizer

        self.bridge_python = bridge_python
        self.hf = scratch / "hf"
        self.checkpoints = {converter: scratch / f"{converter}-megatron" for converter in CONVERTERS}
        self.exported = {converter: scratch / f"{converter}-hf" for converter in CONVERTERS}
        make_model(self.hf, num_gigabytes, sparse=False, family="qwen3")
        save_tokenizer(self.hf)
        self.size = num_bytes(self.hf)

    def run(self) -> dict[Run, Usage]:
        """Run every conversion once."""
        for folder in (*self.checkpoints.values(), *self.exported.values()):
            shutil.rmtree(folder, ignore_errors=True)
        usages = {}
        for direction in (START, IMPORT, EXPORT):
            for converter in CONVERTERS:
                command = self.command(direction, converter)
                # So that no contestant pays for what the one before has not yet written to disk.
                os.sync()
                environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"}
                usages[Run(self.size, direction, converter)] = measure(command, environment)
        return usages

    def command(self, direction: str, converter: str) -> list[str | Path]:
        """Return the command line of a conversion."""
        checkpoint = self.checkpoints[converter]
        exported = self.exported[converter]
        if converter == BRIDGE:
            program: list[str | Path] = [
                self.bridge_python,
                "-W",
                "ignore",
                "-m",
                "benchmarks.convert_vs_bridge",
            ]
            return [*program, "--with-bridge", direction, self.hf, checkpoint, exported]
        program = [sys.executable, "-m", "checkpoints_conv"]
        if direction == START:
            return [*program, "inspect", self.hf]
        paths: list[str | Path] = ["--hf-model", self.hf, "--output", checkpoint]
        if direction == EXPORT:
            paths = ["--megatron-checkpoint", checkpoint, "--hf-config", self.hf, "--output", exported]
        return [*program, direction, *paths, "--workers", str(NUM_WORKERS)]

    def num_different(self) -> dict[str, int]:
        """Count the tensors of each result that are not the model's, bit for bit."""
        from checkpoints_conv.verify import verify

        counts = {}
        for converter in CONVERTERS:
            checkpoint = self.checkpoints[converter]
            exported = self.exported[converter]
            if checkpoint.exists():
                counts[f"{converter} {IMPORT}"] = len(verify(self.hf, checkpoint).different)
            if exported.exists() and self.checkpoints[OURS].exists():
                # Our own checkpoint equals the model, or the count above says otherwise.
                counts[f"{converter} {EXPORT}"] = len(verify(exported, self.checkpoints[OURS]).different)
        return counts


def medians(repetitions: Sequence[Mapping[Run, Usage]]) -> dict[Run, Usage]:
    """Take the median of each figure over the repetitions; a contestant that failed once has failed."""
    result = {}
    for run in repetitions[0]:
        usages = [repetition[run] for repetition in repetitions]
        errors = [usage.error for usage in usages if usage.error]
        result[run] = Usage(
            seconds=statistics.median(usage.seconds for usage in usages),
            processor_seconds=statistics.median(usage.processor_seconds for usage in usages),
            peak_bytes=statistics.median(usage.peak_bytes for usage in usages),
            peak_anonymous_bytes=statistics.median(usage.peak_anonymous_bytes for usage in usages),
            error=errors[0] if errors else "",
        )
    return result


def usage_table(usages: Mapping[Run, Usage]) -> str:
    """Write a row for each contestant; the error stands in the row of one that failed."""
    lines = [
        "| model GB | direction | converter | seconds | processor seconds | peak RSS GB | anonymous GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for run, usage in usages.items():
        figures = (
            f"{usage.seconds:.1f} | {usage.processor_seconds:.1f} | {usage.peak_bytes / 1e9:.3f} | "
            f"{usage.peak_anonymous_bytes / 1e9:.3f}"
        )
        if usage.error:
            figures = f"failed: {usage.error} | | | "
        lines.append(f"| {run.size / 1e9:.2f} | {run.direction} | {run.converter} | {figures} |")
    return "\n".join(lines)


def ratio_table(usages: Mapping[Run, Usage]) -> str:
    """Write Megatron-Bridge's figures divided by ours."""
    lines = ["| model GB | direction | seconds | processor seconds | peak RSS |", "|---|---|---|---|---|"]
    for run, usage in usages.items():
        reference = usages[run._replace(converter=OURS)]
        if run.converter != BRIDGE or usage.error or reference.error:
            continue
        ratios = (
            f"{usage.seconds / reference.seconds:.1f} | "
            f"{usage.processor_seconds / reference.processor_seconds:.1f} | "
            f"{usage.peak_bytes / reference.peak_bytes:.1f}"
        )
        lines.append(f"| {run.size / 1e9:.2f} | {run.direction} | {ratios} |")
    return "\n".join(lines)


def deepseek_note(usages: Mapping[Run, Usage]) -> str:
    """Extend each figure to DeepSeek-V3's size, on the line through the smallest and the largest model."""
    from benchmarks.convert_models import MOONLIGHT
    from nemo_grpo.models import read_spec
    from nemo_grpo.plan.parameters import model_parameters

    sizes = [run.size for run in usages]
    smallest = min(sizes)
    largest = max(sizes)
    if smallest == largest:
        return "One size gives no line to DeepSeek-V3's; measure two."
    num_parameters = model_parameters(read_spec(MOONLIGHT | DEEPSEEK_V3))
    size = 2 * num_parameters
    steps = (size - smallest) / (largest - smallest)
    lines = [
        f"DeepSeek-V3 has {num_parameters / 1e9:.0f} billion weights, {size / 1e9:,.0f} GB in BF16. By "
        f"arithmetic alone, on the lines through {smallest / 1e9:.2f} and {largest / 1e9:.2f} GB (nothing of "
        "that size was run):",
        "",
        "| direction | converter | hours | processor hours | peak RSS GB |",
        "|---|---|---|---|---|",
    ]
    for direction in (IMPORT, EXPORT):
        for converter in CONVERTERS:
            first = usages[Run(smallest, direction, converter)]
            last = usages[Run(largest, direction, converter)]
            if first.error or last.error:
                continue
            seconds = extended(first.seconds, last.seconds, steps)
            processor_seconds = extended(first.processor_seconds, last.processor_seconds, steps)
            peak_bytes = extended(first.peak_bytes, last.peak_bytes, steps)
            figures = f"{seconds / 3600:.2f} | {processor_seconds / 3600:.2f} | {peak_bytes / 1e9:,.2f}"
            lines.append(f"| {direction} | {converter} | {figures} |")
    return "\n".join(lines)


def extended(first: float, last: float, steps: float) -> float:
    """Extend a line from ``first`` through ``last`` to ``steps`` times their distance."""
    # Noise can slope the line downwards; a larger model costs at least as much as the largest measured one.
    return max(last, first + steps * (last - first))


def machine() -> str:
    """Describe the processor, its cores and the memory."""
    cpu_lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in cpu_lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    model = models[0] if models else "processor of unknown name"
    return f"{os.cpu_count()} cores ({model}), {memory / 1e9:.0f} GB of memory"


def bridge_versions(bridge_python: Path) -> str:
    """Ask the environment of Megatron-Bridge for the versions that are compared."""
    packages = ("megatron-bridge", "megatron-core", "torch", "transformers")
    program = f"from importlib.metadata import version\nfor p in {packages}: print(p, version(p))"
    result = subprocess.run([bridge_python, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    return ", ".join(result.stdout.splitlines())


def report(arguments: argparse.Namespace) -> str:
    """Run every contest and write the tables."""
    usages: dict[Run, Usage] = {}
    difference_lines = []
    loads = [os.getloadavg()[0]]
    for num_gigabytes in arguments.sizes:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
            contest = Contest(Path(scratch), num_gigabytes, arguments.bridge_python)
            repetitions = []
            for _ in range(arguments.repeat):
                repetitions.append(contest.run())
                loads.append(os.getloadavg()[0])
            usages |= medians(repetitions)
            for conversion, count in contest.num_different().items():
                difference_lines.append(f"- {contest.size / 1e9:.2f} GB, {conversion}: {count}")
    sizes = " ".join(f"{size:g}" for size in arguments.sizes)
    load_averages = ", ".join(f"{load:.1f}" for load in loads)
    command = f"python -m benchmarks.convert_vs_bridge --sizes {sizes} --repeat {arguments.repeat}"
    parts = [
        "# The converters beside Megatron-Bridge",
        f"`{command}` on {machine()}; {bridge_versions(arguments.bridge_python)}; load average at the start "
        f"and after each repetition: {load_averages}.",
        "Medians of the repetitions, the start of the processes included. Our converters flush their result "
        f"to disk and use {NUM_WORKERS} workers. Peak RSS is that of the process tree and counts pages of "
        "mapped files; the last column leaves these out, because the kernel can drop them. Bridge runs with "
        "stand-ins for Transformer Engine and CUDA.",
        usage_table(usages),
        f"{BRIDGE}'s figure divided by ours:",
        ratio_table(usages),
        "Tensors that differ from the model's, bit for bit:",
        "\n".join(difference_lines),
        "## DeepSeek-V3's size",
        deepseek_note(usages),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    if sys.argv[1:2] == ["--with-bridge"]:
        convert_with_bridge(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[1, 3, 7], help="GB of bf16 weights, from 0.85"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--scratch", type=Path, help="a folder on the disk to measure; five times a model's size"
    )
    parser.add_argument(
        "--bridge-python", type=Path, default=BRIDGE_PYTHON, help="of an environment with Bridge"
    )
    parser.add_argument("--output", type=Path, help="a Markdown file beside the printed tables")
    arguments = parser.parse_args()
    if not arguments.bridge_python.exists():
        parser.error(
            f"--bridge-python {arguments.bridge_python} is missing; make it with `make venv-nemo-rl`"
        )
    tables = report(arguments)
    print(tables)
    if arguments.output is not None:
        arguments.output.write_text(tables)


if __name__ == "__main__":
    main()
