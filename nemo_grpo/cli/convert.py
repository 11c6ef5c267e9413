"""``nemo-grpo convert``, the same as ``python -m checkpoints_conv``."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from nemo_grpo.support.errors import UserError

if TYPE_CHECKING:
    from checkpoints_conv.verify import Comparison

EXIT_DIFFERENT = 1

app = typer.Typer(
    name="convert",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Convert checkpoints between Hugging Face and Megatron: no GPU, no model, constant memory.",
)

Dtype = Annotated[
    str | None, Option(help="Write the weights in bf16, fp16 or fp32. Without it nothing is rounded.")
]
Workers = Annotated[int, Option(min=1, help="Number of threads. Each needs a few megabytes.")]
Resume = Annotated[bool, Option("--resume", help="Finish an interrupted conversion.")]
Force = Annotated[bool, Option("--force", help="Replace an existing output, or start over.")]
Sha256 = Annotated[bool, Option("--sha256", help="Also write SHA256SUMS, which reads the result once.")]
Json = Annotated[bool, Option("--json", help="Print the result as JSON.")]
Output = Annotated[Path, Option(help="Folder to create. It appears when it is complete.")]
HFModel = Annotated[Path, Option(help="Hugging Face folder with config.json and *.safetensors.")]
Megatron = Annotated[
    Path, Option(help="Megatron checkpoint: a torch_dist folder, its parent, or NeMo-RL's step_N.")
]


@app.command("hf-to-megatron")
def hf_to_megatron_command(
    hf_model: HFModel,
    output: Output,
    dtype: Dtype = None,
    workers: Workers = 2,
    padded_vocab_size: Annotated[
        int | None, Option(help="Rows of the embeddings. The default is the model's vocab_size.")
    ] = None,
    resume: Resume = False,
    force: Force = False,
    sha256: Sha256 = False,
) -> None:
    """Write a torch_dist checkpoint that megatron-core loads at any TP/PP/EP.

    Example: python -m checkpoints_conv hf-to-megatron --hf-model Qwen2.5-7B --output qwen-megatron
    """
    from checkpoints_conv.hf_to_megatron import hf_to_megatron

    options: dict[str, Any] = {"dtype": dtype, "num_workers": workers, "sha256": sha256}
    options |= {"resume": resume, "force": force}
    hf_to_megatron(hf_model, output, padded_vocab_size=padded_vocab_size, **options)
    typer.echo(str(output))


@app.command("megatron-to-hf")
def megatron_to_hf_command(
    megatron_checkpoint: Megatron,
    output: Output,
    hf_config: Annotated[
        Path | None, Option(help="Folder with config.json and tokenizer. The default with --lora is --base.")
    ] = None,
    dtype: Dtype = None,
    max_shard_size: Annotated[
        str, Option(help="Size of the largest weight file, such as 5GB or 500MB.")
    ] = "5GB",
    lora: Annotated[
        Literal["merge", "adapter"] | None,
        Option(help="Of a LoRA checkpoint: merge adds the adapters to --base, adapter writes a PEFT folder."),
    ] = None,
    base: Annotated[
        Path | None, Option(help="Model that the LoRA checkpoint adapts; needed with --lora.")
    ] = None,
    lora_alpha: Annotated[
        float | None, Option(help="LoRA's alpha. The default is that of the checkpoint's run_config.yaml.")
    ] = None,
    workers: Workers = 2,
    resume: Resume = False,
    force: Force = False,
    sha256: Sha256 = False,
) -> None:
    """Write a Hugging Face folder that transformers and vLLM load.

    Example: python -m checkpoints_conv megatron-to-hf --megatron-checkpoint checkpoints/step_100
    --hf-config Qwen2.5-7B --output qwen-trained
    """
    from checkpoints_conv.megatron_to_hf import megatron_to_hf

    options: dict[str, Any] = {"dtype": dtype, "num_workers": workers, "sha256": sha256}
    options |= {"resume": resume, "force": force}
    shard_bytes = num_bytes(max_shard_size)
    if (lora is None) != (base is None):
        raise UserError("--lora and --base belong together; give both or neither")
    if lora is None or base is None:
        if hf_config is None:
            raise UserError("--hf-config is missing; give the folder with config.json and tokenizer")
        megatron_to_hf(megatron_checkpoint, hf_config, output, max_shard_bytes=shard_bytes, **options)
    else:
        from checkpoints_conv.lora import export_adapter, merge_lora

        options |= {"hf_config_folder": hf_config, "alpha": lora_alpha}
        if lora == "merge":
            merge_lora(megatron_checkpoint, base, output, max_shard_bytes=shard_bytes, **options)
        else:
            export_adapter(megatron_checkpoint, base, output, **options)
    typer.echo(str(output))


@app.command()
def verify(
    hf_model: HFModel,
    megatron_checkpoint: Megatron,
    logits: Annotated[
        bool, Option("--logits", help="Also compute logits with both models, which must fit in memory.")
    ] = False,
    workers: Workers = 2,
    as_json: Json = False,
) -> None:
    """Compare every tensor of a Hugging Face folder and a Megatron checkpoint bit by bit.

    Exit codes: 0 they are equal; 1 a tensor differs, or with --logits the logits do.
    """
    from checkpoints_conv.verify import verify as compare

    if logits:
        from nemo_grpo.engine.megatron.logits import LOGITS_TOLERANCE, check_computed, compare_logits

        check_computed(hf_model)
    result = compare(hf_model, megatron_checkpoint, workers)
    record = result.to_json()
    is_different = bool(result.different)
    gap = compare_logits(hf_model, megatron_checkpoint) if logits else None
    if gap is not None:
        record["logits_gap"] = gap
        # Not `gap > LOGITS_TOLERANCE`, which is False if the gap is NaN.
        if not gap <= LOGITS_TOLERANCE:
            is_different = True
    if as_json:
        typer.echo(json.dumps(record, indent=2))
    else:
        _show_comparison(result)
        if gap is not None:
            typer.echo(f"logits differ by up to {gap:.3g} (limit {LOGITS_TOLERANCE:g})")
    if is_different:
        raise typer.Exit(EXIT_DIFFERENT)


def _show_comparison(result: "Comparison") -> None:
    for hf, megatron in sorted(result.cast, key=str):
        typer.echo(f"note: {hf} tensors were compared after conversion to {megatron}")
    for name, gap in sorted(result.different.items()):
        typer.echo(f"differs: {name} (by up to {gap:.3g})")
    for name, gap in sorted(result.rounded.items()):
        typer.echo(f"rounded: {name} (by up to {gap:.3g}): its dtype does not hold the other side's numbers")
    rounded = f", {len(result.rounded)} are rounded" if result.rounded else ""
    typer.echo(f"{result.num_tensors} tensors compared, {len(result.different)} differ{rounded}")
    if result.num_hashed:
        typer.echo(f"{result.num_hashed} files match SHA256SUMS")


@app.command()
def inspect(
    path: Annotated[Path, Argument(metavar="DIR", help="Hugging Face folder, or Megatron checkpoint.")],
    tensors: Annotated[bool, Option("--tensors", help="Also list every tensor.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds. Only headers are read; a truncated file is an error."""
    from checkpoints_conv.inspect import summarize

    summary = summarize(path)
    if as_json:
        typer.echo(json.dumps(summary.to_json(tensors), indent=2))
        return
    for label, value in summary.facts:
        typer.echo(f"{label:26} {value}")
    if tensors:
        for name, shape, dtype, size in summary.tensors:
            short_dtype = str(dtype).removeprefix("torch.")
            typer.echo(f"{name:70} {list(shape)!s:22} {short_dtype:9} {size:,}")


def num_bytes(text: str) -> int:
    """Read a size such as ``5GB``, ``500 MB`` or ``1GiB``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", text, re.IGNORECASE)
    size = 0
    if match:
        number, prefix, binary = match.groups()
        unit = 1024 if binary else 1000
        exponent = " KMGT".index(prefix.upper()) if prefix else 0
        size = int(float(number) * unit**exponent)
    # The size is 0 if the text is malformed, or means less than one byte.
    if size == 0:
        raise UserError(f"--max-shard-size {text!r} is not a size; write it like 5GB or 500MB")
    return size
