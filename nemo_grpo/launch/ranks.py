"""Evaluation of the preflight's rank reports, which `rank_process` writes for each GPU of the job."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_grpo.launch.preflight import Row
from nemo_grpo.launch.rank_process import ALL_REDUCE, DONE
from nemo_grpo.recipe import Recipe

Reports = dict[int, dict[str, Any]]
"""Rank -> the fields of `rank_process.Report`."""


def modules_of_ranks(recipe: Recipe) -> list[str]:
    """Return the modules that every rank of a run imports, in the order of their dependencies."""
    modules = ["torch", "megatron.core"]
    if recipe.policy.megatron_cfg.fp8_in_use is not None:
        modules.append("transformer_engine")
    is_embedded = recipe.nemo_grpo.target == "embedded"
    modules.append("nemo_grpo.engine.run" if is_embedded else "nemo_rl")
    return modules


def read_reports(folder: Path) -> Reports:
    """Read the reports that have arrived."""
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def check_ranks(recipe: Recipe, nodes: Sequence[str], reports: Reports) -> list[Row]:
    """Return the rows "imports" and "all-reduce" of the preflight's table.

    Args:
        recipe: recipe of the job.
        nodes: names of the job's nodes in Slurm's order. The first `cluster.gpus_per_node` ranks are on the
            first node, and so on.
        reports: report of each rank.
    """
    rank_nodes = [node for node in nodes for _ in range(recipe.cluster.gpus_per_node)]
    failures = list(_failures(reports))
    # When one rank fails, the job script ends all of them. Then the other ranks' unfinished steps are only a
    # consequence of the failure, and are not reported.
    if not failures:
        failures = list(_unfinished(rank_nodes, reports))
    if failures:
        return failures
    versions = (f"{module} {version}".strip() for module, version in reports[0]["versions"].items())
    return [
        Row("imports", "ok", ", ".join(versions)),
        Row("all-reduce", "ok", f"{len(rank_nodes)} ranks on {', '.join(nodes)}, {reports[0]['backend']}"),
    ]


def _failures(reports: Reports) -> Iterator[Row]:
    """Yield a row for each error, with the ranks that report it."""
    ranks_by_error: dict[tuple[str, str], list[int]] = {}
    for rank, report in sorted(reports.items()):
        if report["error"]:
            ranks_by_error.setdefault((report["step"], report["error"]), []).append(rank)
    for (step, error), ranks in ranks_by_error.items():
        nodes = {rank: reports[rank]["node"] for rank in ranks}
        if step == ALL_REDUCE:
            remedy = "set NCCL_DEBUG=INFO, submit again, and read ranks.log"
            yield Row("all-reduce", "refused", f"{named(nodes)}: {error}; {remedy}")
        else:
            remedy = "repair the environment that PYTHON or CONTAINER names"
            yield Row("imports", "refused", f"{named(nodes)}: {error}; {remedy}")


def _unfinished(rank_nodes: Sequence[str], reports: Reports) -> Iterator[Row]:
    """Yield a row for each step in which the job script's time limit ended some ranks."""
    nodes_by_step: dict[str, dict[int, str]] = {}
    for rank, node in enumerate(rank_nodes):
        step = reports[rank]["step"] if rank in reports else "start"
        nodes_by_step.setdefault(step, {})[rank] = node
    waiting = nodes_by_step.pop(ALL_REDUCE, {})
    nodes_by_step.pop(DONE, None)
    for step, nodes in nodes_by_step.items():
        yield Row(
            "imports",
            "refused",
            f"{named(nodes)} did not answer: ended at {step}; see ranks.log, leave the node out (sbatch "
            "--exclude), or give more time by PREFLIGHT_SECONDS",
        )
    # In the all-reduce, ranks wait for those that have not reached it, and these are at fault. Only if all
    # ranks have reached it, the all-reduce itself hangs.
    if waiting and not nodes_by_step:
        yield Row("all-reduce", "refused", _stuck(waiting, {reports[rank]["backend"] for rank in waiting}))


def _stuck(waiting: dict[int, str], backends: set[str]) -> str:
    sentence = f"{named(waiting)} did not finish it by {' and '.join(sorted(backends))}"
    if len(backends) > 1:
        return (
            f"{sentence}: torch sees no GPU where it is gloo; install there the driver that this torch needs"
        )
    return (
        f"{sentence}; the nodes do not reach each other: set NCCL_DEBUG=INFO and read ranks.log, or name the "
        "network's interface by NCCL_SOCKET_IFNAME"
    )


def named(nodes: dict[int, str]) -> str:
    """Describe ranks with their nodes, such as ``ranks 8, 9 on n2``."""
    parts = []
    for node in dict.fromkeys(nodes.values()):
        ranks = [str(rank) for rank in nodes if nodes[rank] == node]
        word = "rank" if len(ranks) == 1 else "ranks"
        parts.append(f"{word} {', '.join(ranks)} on {node}")
    return "; ".join(parts)
