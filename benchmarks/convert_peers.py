"""The same conversions by mbridge and Megatron-Bridge, which build the model: same bits, time, peak memory.

Neither is a dependency; install what is to be compared without dependencies, where this project is installed:

    python -m pip install --no-deps mbridge==0.15.1 megatron-bridge==0.3.1 einops hydra-core triton
    python benchmarks/convert_peers.py [--size 1.5] [--scratch DIR]

mbridge knows the norms by Transformer Engine's names only; two names are added for layers that run on a CPU.
Megatron-Bridge imports packages that only a GPU host has; empty modules stand in for them here, and the
model is built by this project's engine in both cases.
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import tempfile
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from convert_models import make_model, num_bytes
from peak_memory import in_child

GPU_HOST_ONLY = ("transformer_engine", "modelopt", "nvidia_resiliency_ext", "wandb")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules with whatever class or part is asked for, in place of packages that a CPU host lacks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        absent = name.split(".")[0] in GPU_HOST_ONLY
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return self.module(spec.name)

    def module(self, full_name: str) -> types.ModuleType:
        """An empty module whose capitalised names are classes and whose other names are modules."""
        module: Any = types.ModuleType(full_name)
        module.__path__, module.__all__ = [], []
        module.__getattr__ = lambda name: type(name, (), {}) if name[0].isupper() else self.module(name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def empty_model(hf: Path) -> Any:
    """The model in bf16 on megatron-core, its weights not set."""
    import torch

    from checkpoints_conv.formats.model_folder import hf_config
    from nemo_grpo.engine.megatron import cpu, parallel
    from nemo_grpo.engine.megatron.model import build_model, transformer_config
    from nemo_grpo.families import read_spec
    from nemo_grpo.recipe.layout import Layout

    cpu.install()
    layout = Layout()
    parallel.initialize(layout, torch.device("cpu"), seed=0)
    spec = read_spec(hf_config(hf))
    return build_model(spec, transformer_config(spec, layout, torch.bfloat16))


def mbridge(hf: Path) -> tuple[Callable[[Any], None], Callable[[Any], Iterable[Any]]]:
    """mbridge's way in and out."""
    from mbridge import AutoBridge

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
    return lambda model: bridge.load_weights([model], str(hf)), lambda model: bridge.export_weights([model])


def megatron_bridge(hf: Path) -> tuple[Callable[[Any], None], Callable[[Any], Iterable[Any]]]:
    """Megatron-Bridge's way in and out."""
    import torch

    sys.meta_path.append(Absent())
    from megatron.bridge import AutoBridge

    from nemo_grpo.engine.megatron import cpu

    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.bridge") and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = cpu._torch_for_cpu()
    bridge = AutoBridge.from_hf_pretrained(str(hf), torch_dtype=torch.bfloat16)
    return (
        lambda model: bridge.load_hf_weights([model], str(hf)),
        lambda model: bridge.export_hf_weights([model], cpu=True, show_progress=False),
    )


PEERS = {"mbridge": mbridge, "megatron.bridge": megatron_bridge}


def peer_import(peer: str, hf: Path, megatron: Path) -> None:
    """Hugging Face to torch_dist through a peer and megatron-core."""
    import torch
    from megatron.core import dist_checkpointing

    from nemo_grpo.engine.megatron import writer

    model = empty_model(hf)
    writer.install()
    load, _ = PEERS[peer](hf)
    with torch.no_grad():
        load(model)
    megatron.mkdir()
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(megatron))


def peer_export(peer: str, hf: Path, megatron: Path, target: Path) -> None:
    """torch_dist to Hugging Face through megatron-core and a peer."""
    import torch
    from megatron.core import dist_checkpointing
    from safetensors.torch import save_file

    model = empty_model(hf)
    _, export = PEERS[peer](hf)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(megatron))
    model.load_state_dict(loaded["model"])
    target.mkdir()
    with torch.no_grad():
        tensors = {name: tensor.contiguous() for name, tensor in export(model)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((hf / "config.json").read_bytes())


def is_installed(package: str) -> bool:
    """True if it can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


STEPS = {"import": peer_import, "export": peer_export}


def same_bits(a: Path, b: Path) -> bool:
    """Two model folders hold the same tensors."""
    import torch

    from checkpoints_conv.formats.safetensors_io import SafetensorsFolder

    first, second = SafetensorsFolder(a), SafetensorsFolder(b)
    return first.tensors.keys() == second.tensors.keys() and all(
        torch.equal(first.read(name).view(torch.int16), second.read(name).view(torch.int16))
        for name in first.tensors
    )


def compare(scratch: Path, size: float, peers: list[str]) -> None:
    """Run all conversions and print the table."""
    hf, ours, ours_hf = scratch / "hf", scratch / "ours", scratch / "ours-hf"
    make_model(hf, size, sparse=False)
    command = ("checkpoints_conv", "hf-to-megatron", "--hf-model", hf, "--output", ours)
    rows = {"HF to Megatron, checkpoints_conv": in_child(*command)}
    for peer in peers:
        rows[f"HF to Megatron, {peer}"] = in_child(__file__, "--step", "import", peer, hf, scratch / peer)
    command = ("checkpoints_conv", "megatron-to-hf", "--megatron-checkpoint", ours, "--hf-config", hf)
    rows["Megatron to HF, checkpoints_conv"] = in_child(*command, "--output", ours_hf)
    for peer in peers:
        command = (__file__, "--step", "export", peer, hf, scratch / peer, scratch / f"{peer}-hf")
        rows[f"Megatron to HF, {peer}"] = in_child(*command)
    print(f"{num_bytes(hf) / 1e9:.2f} GB\n\n| | seconds | peak RSS GB |\n|---|---|---|")
    for name, (seconds, peak) in rows.items():
        print(f"| {name} | {seconds:.1f} | {peak / 1e9:.2f} |")
    for folder in (ours, *(scratch / peer for peer in peers)):
        in_child("checkpoints_conv", "verify", "--hf-model", hf, "--megatron-checkpoint", folder)
    same = {peer: same_bits(ours_hf, scratch / f"{peer}-hf") for peer in peers}
    print(f"\nEvery Megatron checkpoint holds the source's bits; exports equal to ours: {same}")


def main() -> None:
    if sys.argv[1:2] == ["--step"]:
        STEPS[sys.argv[2]](sys.argv[3], *map(Path, sys.argv[4:]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=float, default=1.5, help="GB of bf16 weights")
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to use")
    options = parser.parse_args()
    peers = [peer for peer in PEERS if is_installed(peer)]
    if not peers:
        print("neither mbridge nor Megatron-Bridge is installed; nothing to compare with")
        return
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        compare(Path(scratch), options.size, peers)


if __name__ == "__main__":
    main()
