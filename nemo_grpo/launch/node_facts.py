"""One node's report before a job starts: ``python node_facts.py FOLDER`` writes FOLDER/NODE.json.

The script runs on all nodes at once. It imports only the standard library, so that it is quick and works on a
node with a broken installation. The file's arrival also proves that the folder is shared and writable.
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
        node: name of the node in Slurm, or of the host.
        gpus: names of the GPUs.
        versions: versions of Python and of the installed `PACKAGES`.
    """
    return {
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "gpus": find_gpus(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def find_gpus() -> list[str]:
    """List the names of the GPUs that this job may use.

    Without nvidia-smi the list has one "gpu" for each GPU that Slurm allocated. It is empty if nvidia-smi
    fails or hangs, as it does after losing a GPU, because the node is unusable then.
    """
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        # nvidia-smi can hang for ever if the driver has lost a GPU, so it gets a minute.
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return listed.stdout.split("\n")[:-1]
    except OSError:
        # Without nvidia-smi, only Slurm's count is known.
        return ["gpu"] * int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    except subprocess.SubprocessError as error:
        sys.stderr.write(f"nvidia-smi: {getattr(error, 'stdout', None) or ''}{error}\n")
        return []


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        # A package may be missing here: NeMo-RL's container has megatron-core and vLLM only in the
        # environments of its workers.
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def main(folder: Path) -> int:
    """Write the facts; returns exit code 1 if the folder is missing or cannot be written."""
    facts = collect()
    target = folder / f"{facts['node']}.json"
    try:
        # Write under another name and rename, so that nobody reads half a file.
        temporary = target.with_suffix(".tmp")
        temporary.write_text(json.dumps(facts, indent=1) + "\n")
        temporary.rename(target)
    except OSError as error:
        sys.stderr.write(f"{facts['node']}: {target} cannot be written: {error.strerror}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
