"""The same conversions by mbridge, which builds the model: same bits, time and peak memory side by side.

mbridge is not a dependency; install it without dependencies where this project is installed:

    python -m pip install --no-deps mbridge==0.15.1 einops
    python benchmarks/convert_peers.py [--size 1.5] [--scratch DIR]

mbridge knows the norms by Transformer Engine's names only; two names are added for layers that run on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from convert_models import make_model, num_bytes


def bridge_and_model(hf: Path):  # type: ignore[no-untyped-def]
    """mbridge's bridge, and an empty model in bf16."""
    import torch
    from mbridge import AutoBridge
    from transformers import AutoConfig

    from nemo_grpo.engine.megatron import cpu, parallel
    from nemo_grpo.engine.megatron.model import build_model, transformer_config

    cpu.install()
    layout = parallel.Layout()
    parallel.initialize(layout, torch.device("cpu"), seed=0)
    bridge = AutoBridge.from_pretrained(str(hf))
    names = "model.layers.{layer_number}."
    bridge._ATTENTION_MAPPING["input_layernorm.weight"] = [f"{names}input_layernorm.weight"]
    bridge._MLP_MAPPING["pre_mlp_layernorm.weight"] = [f"{names}post_attention_layernorm.weight"]
    attention = bridge._weight_name_mapping_mcore_to_hf

    def to_hf(name: str) -> list[str]:
        layer = name.split(".")[2] if name.startswith("decoder.layers.") else ""
        for norm, hf_name in (("input", "input"), ("pre_mlp", "post_attention")):
            if name.endswith(f".{norm}_layernorm.weight"):
                return [f"model.layers.{layer}.{hf_name}_layernorm.weight"]
        return list(attention(name))

    bridge._weight_name_mapping_mcore_to_hf = to_hf
    config = AutoConfig.from_pretrained(hf)
    return bridge, build_model(config, transformer_config(config, layout, torch.bfloat16))


def mbridge_import(hf: Path, megatron: Path) -> None:
    """Hugging Face to torch_dist through mbridge and megatron-core."""
    import torch
    from megatron.core import dist_checkpointing

    bridge, model = bridge_and_model(hf)
    with torch.no_grad():
        bridge.load_weights([model], str(hf))
    megatron.mkdir()
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(megatron))


def mbridge_export(hf: Path, megatron: Path, target: Path) -> None:
    """torch_dist to Hugging Face through megatron-core and mbridge."""
    import torch
    from megatron.core import dist_checkpointing
    from safetensors.torch import save_file

    bridge, model = bridge_and_model(hf)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(megatron))
    model.load_state_dict(loaded["model"])
    target.mkdir()
    with torch.no_grad():
        tensors = {name: tensor.contiguous() for name, tensor in bridge.export_weights([model])}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((hf / "config.json").read_bytes())


def in_child(action: str, *arguments: Path) -> tuple[float, float]:
    """Run a step in a process of its own. Returns: seconds, peak RSS in bytes."""
    own = action.startswith("mbridge")
    command = [sys.executable, *(["-W", "ignore", __file__, "--step"] if own else ["-m", "checkpoints_conv"])]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    pid = os.posix_spawn(sys.executable, [*command, action, *map(str, arguments)], environment)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{action} failed with status {status}")
    return time.monotonic() - start, usage.ru_maxrss * 1024.0


def same_bits(a: Path, b: Path) -> bool:
    """Two model folders hold the same tensors."""
    import torch

    from checkpoints_conv.safetensors_io import SafetensorsFolder

    first, second = SafetensorsFolder(a), SafetensorsFolder(b)
    return first.tensors.keys() == second.tensors.keys() and all(
        torch.equal(first.read(name).view(torch.int16), second.read(name).view(torch.int16))
        for name in first.tensors
    )


def compare(scratch: Path, size: float) -> None:
    """Run the four conversions and print the table."""
    hf = scratch / "hf"
    make_model(hf, size, sparse=False)
    ours, theirs, ours_hf, theirs_hf = (scratch / name for name in ("m1", "m2", "h1", "h2"))
    flag = Path  # arguments are passed as text
    rows = {
        "HF to Megatron, mbridge": in_child("mbridge-import", hf, theirs),
        "HF to Megatron, checkpoints_conv": in_child(
            "hf-to-megatron", flag("--hf-model"), hf, flag("--output"), ours
        ),
        "Megatron to HF, mbridge": in_child("mbridge-export", hf, theirs, theirs_hf),
        "Megatron to HF, checkpoints_conv": in_child(
            *("megatron-to-hf", flag("--megatron-checkpoint"), theirs, flag("--hf-config"), hf),
            *(flag("--output"), ours_hf),
        ),
    }
    print(f"{num_bytes(hf) / 1e9:.2f} GB\n\n| | seconds | peak RSS GB |\n|---|---|---|")
    for name, (seconds, peak) in rows.items():
        print(f"| {name} | {seconds:.1f} | {peak / 1e9:.2f} |")
    in_child("verify", flag("--hf-model"), hf, flag("--megatron-checkpoint"), ours)
    in_child("verify", flag("--hf-model"), hf, flag("--megatron-checkpoint"), theirs)
    print(
        f"\nBoth Megatron checkpoints hold the source's bits; both exports: {same_bits(ours_hf, theirs_hf)}"
    )


def main() -> None:
    if sys.argv[1:2] == ["--step"]:
        steps = {"mbridge-import": mbridge_import, "mbridge-export": mbridge_export}
        steps[sys.argv[2]](*map(Path, sys.argv[3:]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=1.5, help="GB of bf16 weights")
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to use")
    options = parser.parse_args()
    if importlib.util.find_spec("mbridge") is None:
        print("mbridge is not installed; nothing to compare with")
        return
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        compare(Path(scratch), options.size)


if __name__ == "__main__":
    main()
