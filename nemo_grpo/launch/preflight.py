"""Checks of a job's nodes, folders and environment against its recipe, and settings for its scripts."""

import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemo_grpo.launch.plan_summary import checkpoint_bytes, kind_of, plan_verdict
from nemo_grpo.recipe import Recipe
from nemo_grpo.run.recipe_checks import check_recipe, remedies
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.files import existing_parent


@dataclass(frozen=True)
class Row:
    """Result of one check.

    Attributes:
        check: name of the check in the table.
        verdict: only ``refused`` keeps a job from starting; ``note`` does not.
        finding: result of the measurement; for a refusal also the rule and the remedy.
    """

    check: str
    verdict: Literal["ok", "note", "refused"]
    finding: str


@dataclass(frozen=True)
class Job:
    """Nodes that Slurm allocated to a job, with what they reported.

    Attributes:
        nodes: names of the nodes.
        facts: report of each node, see `node_facts.collect`.
    """

    nodes: Sequence[str]
    facts: Sequence[dict[str, Any]]


def read_facts(folder: Path) -> list[dict[str, Any]]:
    """Read the facts that have arrived, sorted by node."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def check_job(recipe: Recipe, job: Job) -> list[Row]:
    """Return one row for each check of the job's nodes and folders."""
    checks = (plan, recipe_and_data, shared_folder, num_nodes, gpus, free_space, versions)
    return [row for check in checks for row in check(recipe, job)]


def plan(recipe: Recipe, job: Job) -> Iterator[Row]:
    """Check that the recipe fits on the job's GPUs."""
    names = {name for facts in job.facts for name in facts["gpus"]}
    kinds = {kind_of(name) for name in names}
    kind = kinds.pop() if len(kinds) == 1 else None
    if recipe.nemo_grpo.target == "cluster" and kind is None:
        place = ", ".join(sorted(names)) if names else "a node without GPUs"
        yield Row("plan", "note", f"not made for {place}")
        return
    # The planner knows few models. One that it does not know may still fit, so its error is a note.
    try:
        accepted, sentence = plan_verdict(recipe, kind or "h100")
        yield Row("plan", "ok" if accepted else "refused", sentence)
    except UserError as error:
        yield Row("plan", "note", str(error))


def recipe_and_data(recipe: Recipe, _job: Job) -> Iterator[Row]:
    """Check recipe and data as `nemo-grpo recipe check` and `launch` do."""
    checked = check_recipe(recipe, continues=True)
    for sentence in checked.errors:
        yield Row("recipe", "refused", sentence)
    for sentence in remedies(checked.missing):
        yield Row("data", "refused", sentence)
    for sentence in checked.notes:
        yield Row("data", "note", sentence)
    if checked.found:
        yield Row("data", "ok", checked.found)


def shared_folder(_recipe: Recipe, job: Job) -> Iterator[Row]:
    """Check that every node's report has arrived in the log folder."""
    # A report that arrived proves that the folder is shared and writable. A list of mounts would not.
    silent_nodes = sorted(set(job.nodes) - {facts["node"] for facts in job.facts})
    if silent_nodes:
        finding = (
            f"{', '.join(silent_nodes)} did not write into the log folder; it must be on a filesystem that "
            "all nodes share (LOGS), and the interpreter must be there (PYTHON); see nodes.log"
        )
        yield Row("shared folder", "refused", finding)
    else:
        yield Row("shared folder", "ok", f"written by {', '.join(job.nodes)}")


def num_nodes(recipe: Recipe, job: Job) -> Iterator[Row]:
    """Check that the job has the recipe's number of nodes."""
    expected = recipe.cluster.num_nodes
    allocated = len(job.nodes)
    if allocated == expected:
        yield Row("nodes", "ok", str(allocated))
    else:
        remedy = f"use sbatch --nodes={expected} or that override"
        yield Row("nodes", "refused", f"cluster.num_nodes={expected}, the job has {allocated}; {remedy}")


def gpus(recipe: Recipe, job: Job) -> Iterator[Row]:
    """Check that every node has the recipe's number of GPUs; the embedded engine also runs on CPUs alone."""
    expected = recipe.cluster.gpus_per_node
    counts = {facts["node"]: len(facts["gpus"]) for facts in job.facts}
    if recipe.nemo_grpo.target == "embedded" and not any(counts.values()):
        yield Row("GPUs", "note", "none: this is a run on CPUs")
        return
    short_nodes = [f"{node} has {count}" for node, count in sorted(counts.items()) if count < expected]
    if short_nodes:
        remedy = f"ask Slurm for --gpus-per-node={expected}"
        finding = f"cluster.gpus_per_node={expected}, but {', '.join(short_nodes)}; {remedy}"
        yield Row("GPUs", "refused", finding)
        return
    kinds = sorted({name for facts in job.facts for name in facts["gpus"]})
    # GPUs of several kinds can train together, so this is only a note. The slowest one sets the pace.
    if len(kinds) > 1:
        yield Row("GPUs", "note", f"{expected} per node, of several kinds: {', '.join(kinds)}")
    else:
        yield Row("GPUs", "ok", f"{expected} per node, {', '.join(kinds)}")


def free_space(recipe: Recipe, _job: Job) -> Iterator[Row]:
    """Check that the disk has room for one more checkpoint, if the run saves any. Quotas are not checked."""
    if not recipe.checkpointing.enabled:
        return
    folder = existing_parent(recipe.checkpoint_dir)
    free = shutil.disk_usage(folder).free
    required = checkpoint_bytes(recipe)
    room = f"{gib(free)} in {folder}"
    if required is None:
        yield Row("free space", "note", f"{room}; the size of a checkpoint is not known here")
    elif free >= required:
        yield Row("free space", "ok", f"{room}, a checkpoint needs {gib(required)}")
    elif recipe.policy.megatron_cfg.lora_in_use:
        # ``required`` is for the whole model. Adapters are a small part of it, so they may well fit.
        finding = f"{room}; the whole model would need {gib(required)}, its adapters less"
        yield Row("free space", "note", finding)
    else:
        remedy = "make room, or choose another checkpointing.checkpoint_dir"
        yield Row("free space", "refused", f"{room}, a checkpoint needs {gib(required)}; {remedy}")


def versions(_recipe: Recipe, job: Job) -> Iterator[Row]:
    """Check that all nodes run the same packages."""
    if not job.facts:
        return
    different = differing({facts["node"]: facts["versions"] for facts in job.facts})
    if different:
        yield Row("versions", "refused", f"{different}; use one environment on all nodes")
    else:
        same = [f"{name} {version}" for name, version in job.facts[0]["versions"].items()]
        yield Row("versions", "ok", ", ".join(same))


def differing(tables: dict[str, dict[str, str]]) -> str:
    """List the keys whose values differ between the tables, as ``"KEY: n1 a, n2 b"``."""
    lines = []
    for key in sorted({key for table in tables.values() for key in table}):
        values = {node: table.get(key, "unset") for node, table in sorted(tables.items())}
        if len(set(values.values())) > 1:
            nodes = [f"{node} {value}" for node, value in values.items()]
            lines.append(f"{key}: {', '.join(nodes)}")
    return "; ".join(lines)


def gib(num_bytes: float) -> str:
    """Write a size as ``"1.5 GiB"``."""
    return f"{num_bytes / 2**30:.1f} GiB"


def shell_settings(recipe: Recipe) -> str:
    """Write the run's folders, GPUs per node and initial model as shell assignments for the job scripts."""
    values = {
        "RUN_DIR": recipe.run_dir.absolute(),
        "CHECKPOINT_DIR": recipe.checkpoint_dir.absolute(),
        "SAVES": "yes" if recipe.checkpointing.enabled else "",
        "GPUS_PER_NODE": recipe.cluster.gpus_per_node,
        "NUM_NODES": recipe.cluster.num_nodes,
        "TARGET": recipe.nemo_grpo.target,
        "MODEL": folder_of(recipe.policy.model_name or ""),
        "LORA": "merge" if recipe.policy.megatron_cfg.lora_in_use else "",
    }
    # Quoted, because a folder's name may contain spaces, or characters that a shell would interpret.
    return "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())


def folder_of(model: str) -> str:
    """Find the local folder of a downloaded Hub model. Any other ``model`` is returned unchanged."""
    if not model or Path(model).is_dir():
        return model
    # Imported here, because the import takes a second and most commands do not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(model, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return model
