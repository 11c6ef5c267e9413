"""A driver that stands in for NeMo-RL's: holds every GPU of every node through Ray, counts, saves, resumes.

    stand_in.py RECIPE [key=value ...]

In the environment: FOLDER of checkpoints, STEPS, PACE: seconds of a step, FAIL_AT: a step that exits with 3.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

GPUS = 2


@ray.remote(num_cpus=1, num_gpus=GPUS)
class Worker:
    def place(self):
        return socket.gethostname(), len(ray.get_gpu_ids())


def main():
    stop = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: stop.append(number))
    num_nodes, folder = int(os.environ["SLURM_JOB_NUM_NODES"]), Path(os.environ["FOLDER"])
    ray.init(address="auto", log_to_driver=False)
    signal.signal(signal.SIGTERM, lambda number, _frame: stop.append(number))  # Ray has one of its own
    group = placement_group([{"CPU": 1, "GPU": GPUS}] * num_nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=60)
    places = [PlacementGroupSchedulingStrategy(group, i) for i in range(num_nodes)]
    workers = [Worker.options(scheduling_strategy=place).remote() for place in places]
    found = ray.get([worker.place.remote() for worker in workers], timeout=60)
    print("workers", sorted(found), flush=True)
    assert len({host for host, _ in found}) == num_nodes
    saved = sorted(folder.glob("step_*"))
    step = int(saved[-1].name.removeprefix("step_")) if saved else 0
    print(f"start from step {step}", flush=True)
    while step < int(os.environ.get("STEPS", "3")):
        ray.get([worker.place.remote() for worker in workers], timeout=60)
        time.sleep(float(os.environ.get("PACE", "0.1")))
        step += 1
        if step == int(os.environ.get("FAIL_AT", "-1")):
            print("the driver breaks", flush=True)
            return 3
        if stop or step % 5 == 0:
            (folder / f"step_{step}").mkdir(parents=True, exist_ok=True)
        if stop:
            print(f"saved step {step}", flush=True)
            return 75
    print(f"finished step {step}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
