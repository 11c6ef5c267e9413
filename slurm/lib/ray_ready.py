"""Wait until every Slurm node has registered its GPUs with Ray; name those that have not."""

import argparse
import sys
import time
from pathlib import Path

import ray

RESOURCE = "slurm-node-"
"""A Ray node says with this resource which Slurm node it is; slurm/lib/ray.sh sets it."""


def registered() -> dict[str, int]:
    """GPUs of each Slurm node that is alive in Ray's table."""
    found: dict[str, int] = {}
    for node in ray.nodes():
        if node["Alive"]:
            names = [key.removeprefix(RESOURCE) for key in node["Resources"] if key.startswith(RESOURCE)]
            found |= {name: int(node["Resources"].get("GPU", 0)) for name in names}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", nargs="+")
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--missing", type=Path, required=True, help="file for the names of missing nodes")
    wanted = parser.parse_args()
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    began = time.monotonic()
    while True:
        found = registered()
        missing = [name for name in wanted.nodes if found.get(name, -1) < wanted.gpus_per_node]
        waited = time.monotonic() - began
        if not missing:
            print(f"{len(wanted.nodes)} nodes x {wanted.gpus_per_node} GPUs registered after {waited:.0f} s")
            return 0
        if waited > wanted.seconds:
            for name in missing:
                state = f"{found[name]} GPUs" if name in found else "not registered"
                print(f"{name}: {state} after {waited:.0f} s, {wanted.gpus_per_node} GPUs expected")
            wanted.missing.write_text("".join(f"{name}\n" for name in missing))
            return 1
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
