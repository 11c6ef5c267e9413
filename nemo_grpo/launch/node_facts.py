"""One node's report before a job starts: ``python node_facts.py FOLDER`` writes FOLDER/NODE.json.

Runs as a script on all nodes at once; imports the standard library only, so that it is quick and works on a
broken node. The file's arrival also proves that the folder is shared and writable.
"""

import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGES = ("nemo-grpo", "torch", "ray", "megatron-core", "vllm")
"""Packages whose versions must agree on all nodes."""


def collect() -> dict[str, Any]:
    """Return this node's facts.

    Returns:
        node: Slurm's name, or the host's.
        gpus: names of the GPUs.
        versions: of Python and of the installed `PACKAGES`.
    """
    return {
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "gpus": find_gpus(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def find_gpus() -> list[str]:
    """Name the GPUs that this job may use; without nvidia-smi, "gpu" for each that Slurm allocated.

    Empty if nvidia-smi fails or hangs, as it does when a GPU is lost: the node is unusable.
    """
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        # A driver that has lost a GPU may let nvidia-smi hang for ever.
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return listed.stdout.split("\n")[:-1]
    except OSError:
        # There is no nvidia-smi, so that Slurm's count is all that is known.
        return ["gpu"] * int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    except subprocess.SubprocessError as error:
        sys.stderr.write(f"nvidia-smi: {getattr(error, 'stdout', None) or ''}{error}\n")
        return []


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        # In NeMo-RL's container, megatron-core and vLLM lie in the workers' own environments.
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def main(folder: Path) -> int:
    """Write the facts; 1 if the folder is missing or cannot be written."""
    facts = collect()
    target = folder / f"{facts['node']}.json"
    try:
        # By a rename, so that nobody reads half a file.
        temporary = target.with_suffix(".tmp")
        temporary.write_text(json.dumps(facts, indent=1) + "\n")
        temporary.rename(target)
    except OSError as error:
        sys.stderr.write(f"{facts['node']}: {target} cannot be written: {error.strerror}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
