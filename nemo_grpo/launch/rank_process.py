"""One rank of the preflight: ``python rank_process.py FOLDER MODULE...``, started by srun once for each GPU.

The rank imports the modules and takes part in one all-reduce over all ranks, with nccl on a GPU and with gloo
otherwise. Before each step it writes FOLDER/RANK.json, which tells where a rank hung or was killed.

This script itself imports only the standard library, because it must be able to report a broken torch.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

DISTRIBUTIONS = {
    "torch": "torch",
    "megatron.core": "megatron-core",
    "transformer_engine": "transformer-engine",
    "nemo_rl": "nemo-rl",
    "nemo_grpo.engine.run": "nemo-grpo",
}
"""Module that a run may need -> package whose version the report names."""
ALL_REDUCE = "all-reduce"
DONE = "done"
"""Steps of a report besides ``import MODULE``."""
OF_NEMO_RL_WORKERS = ("megatron.core", "transformer_engine")
"""Modules that NeMo-RL's driver does not have where its workers have an environment of their own."""
WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
"""Folder of that environment in NEMO_RL_VENV_DIR; `nemo_grpo.nemorl.host_api.STOCK_WORKER`."""


class Report:
    """The file of one rank.

    Attributes:
        rank: number of the rank, from 0.
        fields: content of the file: rank, node, step, error ("" unless the step failed), versions of the
            imported modules, backend of the all-reduce.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.path = folder / f"{rank}.json"
        node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.fields: dict[str, Any] = {"rank": rank, "node": node, "versions": {}, "backend": ""}

    def write(self, step: str, error: str = "") -> None:
        """Write the file anew with this step."""
        self.fields["step"] = step
        self.fields["error"] = error
        # Write under another name and rename, so that nobody reads half a file.
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.fields) + "\n")
        temporary.rename(self.path)


def main(folder: Path, modules: list[str]) -> int:
    """Import the modules, then all-reduce; returns exit code 1 if either fails."""
    if "nemo_rl" in modules and os.environ.get("NEMO_RL_PY_EXECUTABLES_SYSTEM") != "1":
        python = worker_python()
        if python is not None:
            # Ranks of a training run in the workers' environment, so restart in it. The variable prevents a
            # second restart.
            os.environ["NEMO_RL_PY_EXECUTABLES_SYSTEM"] = "1"
            os.execv(python, [str(python), __file__, str(folder), *modules])
        # NeMo-RL creates the environment of its workers with uv when the run starts. Until then their
        # packages cannot be imported.
        modules = [module for module in modules if module not in OF_NEMO_RL_WORKERS]
    report = Report(folder, int(os.environ["SLURM_PROCID"]))
    for module in modules:
        report.write(f"import {module}")
        try:
            importlib.import_module(module)
        # A broken package may raise any exception, such as OSError for a missing library.
        except Exception as error:
            report.write(f"import {module}", f"{described(module)} cannot be imported: {first_line(error)}")
            raise
        report.fields["versions"][module] = version(module)
    report.write(ALL_REDUCE)
    try:
        all_reduce(report)
    except Exception as error:
        report.write(ALL_REDUCE, first_line(error))
        raise
    report.write(DONE)
    return 0


def all_reduce(report: Report) -> None:
    """Add up a 1 from every rank, and check that the sum is the number of ranks.

    The job script limits the time and kills ranks that hang. Torch's own timeout would end only this process,
    and a hanging nccl does not always obey it.
    """
    import torch
    import torch.distributed as dist

    num_ranks = int(os.environ["SLURM_NTASKS"])
    has_gpu = torch.cuda.is_available()
    backend = "nccl" if has_gpu else "gloo"
    report.fields["backend"] = backend
    report.write(ALL_REDUCE)
    device = torch.device("cpu")
    if has_gpu:
        # The remainder, because a cluster may show each task only one GPU, which then has number 0.
        device = torch.device("cuda", int(os.environ["SLURM_LOCALID"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method="env://", rank=report.rank, world_size=num_ranks)
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    total = int(ones.item())
    dist.destroy_process_group()
    if total != num_ranks:
        raise RuntimeError(f"the sum of one from each of {num_ranks} ranks is {total}")


def worker_python() -> Path | None:
    """Find the Python of NeMo-RL's Megatron workers on this node, or return None before it is created."""
    folder = os.environ.get("NEMO_RL_VENV_DIR")
    if folder is None:
        package = importlib.util.find_spec("nemo_rl")
        if package is None or package.origin is None:
            return None
        folder = str(Path(package.origin).parents[1] / "venvs")  # NeMo-RL's default
    python = Path(folder) / WORKER / "bin" / "python"
    return python if python.exists() else None


def version(module: str) -> str:
    """Return the version of a module's package, or "" for one that is not installed, such as a clone."""
    try:
        return importlib.metadata.version(DISTRIBUTIONS[module])
    except importlib.metadata.PackageNotFoundError:
        return ""


def described(module: str) -> str:
    """Write a module with its package's version, for an error message."""
    installed = version(module) or "not installed"
    return f"{module} ({DISTRIBUTIONS[module]} {installed})"


def first_line(error: Exception) -> str:
    """Return an error's class and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
