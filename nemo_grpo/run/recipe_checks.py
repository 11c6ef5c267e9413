"""Checks of a recipe before anything is built.

Every command runs the same checks: `nemo-grpo recipe check`, the writing of a job, and the start of a run.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_grpo.models import COMPUTED, read_spec, refuse_uncomputed
from nemo_grpo.plan.rules import shape_problems
from nemo_grpo.recipe import Recipe, refuse_unsupported
from nemo_grpo.recipe.recipe import RECIPE_FILE
from nemo_grpo.recipe.validation import RecipeErrors
from nemo_grpo.run.continuation import check_continuation
from nemo_grpo.run.data_checks import data_notes
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.extensions import is_reference
from nemo_grpo.support.model_folder import check_no_other_weights, hf_config, how_to_get, is_hub_name
from nemo_grpo.tasks import Task
from nemo_grpo.tasks.jsonl import FileTaskConfig, check_columns, listed_problems, not_held_out
from nemo_grpo.tasks.own_task import try_own_task
from nemo_grpo.tasks.scoring import Scorer

WRITTEN_BY = {
    ".cache/smollm2": "python -m nemo_grpo.data.smollm2 .cache/smollm2",
}
"""Folder of a model that a shipped recipe names -> command that writes this folder."""
MEGATRON = (".metadata", "iter_*/.metadata", "weights/.metadata", "policy", "step_*/policy")
"""Patterns of files and folders; a folder that has one of them is a Megatron checkpoint."""


@dataclass(frozen=True)
class Findings:
    """The result of `check_recipe`; messages give key, value and remedy.

    Attributes:
        errors: Messages with which the run would end.
        missing: Missing files and folders that another command can write; `remedies` makes messages of them.
        notes: Messages about probable mistakes, with which the run still starts.
        found: Numbers of problems, in words; empty if the task reads no files.
    """

    errors: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    found: str = ""

    def refuse(self, *, missing: bool = True) -> None:
        """Raise the errors, if there are any.

        Args:
            missing: True to raise an error for missing files, too.
        """
        errors = list(self.errors)
        if missing:
            errors += remedies(self.missing)
        if errors:
            raise RecipeErrors(errors)


def check_recipe(recipe: Recipe, *, continues: bool | None = None) -> Findings:
    """Check everything that needs neither a GPU nor another node.

    The checks cover layout, model, data, the user's own code, and the record of an earlier run. Paths are
    relative to the working directory.

    Args:
        recipe: Recipe to check.
        continues: True to compare the recipe with an earlier run of this name. By default it is compared
            where NeMo-RL trains, which always continues an earlier run.
    """
    data = check_data(recipe)
    missing_model = _model_to_be_written(recipe)
    if continues is None:
        continues = recipe.nemo_grpo.target == "cluster"
    checks: list[Callable[[Recipe], object]] = []
    if missing_model is None:
        checks.append(_check_model)
    checks += [_check_engine, try_own_loss]
    # The user's task and rewards are tried on problems, which a task reads from its files.
    if not data.errors and not data.missing:
        checks.append(try_own_task_and_rewards)
    if continues:
        checks.append(check_continuation)
    errors = [message for check in checks for message in _messages(check, recipe)]
    models = () if missing_model is None else (missing_model,)
    return replace(data, errors=(*errors, *data.errors), missing=models + data.missing)


def _messages(check: Callable[[Recipe], object], recipe: Recipe) -> list[str]:
    """Run a check, and return its error messages, so that the next check runs even if this one fails."""
    try:
        check(recipe)
    except UserError as error:
        return error.errors if isinstance(error, RecipeErrors) else [str(error)]
    return []


def _check_engine(recipe: Recipe) -> None:
    """Refuse settings that the recipe's engine does not support, and a layout that does not fit the model."""
    if recipe.nemo_grpo.target == "embedded":
        refuse_unsupported(recipe)
    errors = shape_problems(recipe)
    if errors:
        raise RecipeErrors(errors)


def try_own_loss(recipe: Recipe) -> None:
    """Run the quick part of `nemo-grpo variants check` if the recipe's variant is the user's own."""
    if is_reference(recipe.loss_fn.variant):
        # Imported late, because it imports torch, which the other checks do not need.
        from nemo_grpo.variants.checking import try_out

        try_out(recipe.loss_fn, "loss_fn.variant")


def try_own_task_and_rewards(recipe: Recipe) -> None:
    """Try a task that the user wrote, then call reward functions that the user wrote on a few problems."""
    section = recipe.nemo_grpo
    grpo = recipe.grpo
    if section.task is None:
        return
    if is_reference(section.task.name):
        shows_demonstrations = recipe.loss_fn.learns_from_demonstrations
        num_validation = grpo.num_val_problems if grpo.validates else 0
        try_own_task(section.task, grpo.seed, num_validation, shows_demonstrations=shows_demonstrations)
    if any(is_reference(reward) for reward in section.rewards):
        with closing(Scorer(section.task.build(), section.rewards, section.prompt)) as scorer:
            scorer.try_out(grpo.seed)


def _model_to_be_written(recipe: Recipe) -> str | None:
    """Return the recipe's model folder if it is missing and a command is known that writes it; else None."""
    folder = Path(recipe.policy.model_name or ".")
    if recipe.nemo_grpo.target != "embedded" or folder.exists():
        return None
    return None if _model_remedy(folder) is None else str(folder)


def _model_remedy(folder: Path) -> str | None:
    """Name the command that writes a missing model folder, or None if no command is known."""
    command = WRITTEN_BY.get(str(folder))
    if command is not None:
        return f"`{command}` writes it"
    # runs/NAME/hf, or the export of one step in it.
    if "hf" in folder.parts[-2:]:
        return "train the run that exports it first"
    return None


def _check_model(recipe: Recipe) -> None:
    """Refuse a ``policy.model_name`` that names a folder from which training cannot start."""
    name = recipe.policy.model_name
    setting = "policy.model_name"
    if name is None:
        return
    if recipe.nemo_grpo.target == "embedded":
        check_model_folder(Path(name), setting)
        refuse_uncomputed(read_spec(hf_config(Path(name)), name, COMPUTED))
        return
    # NeMo-RL also takes a name on the Hub, which is not checked here.
    reason = reason_against_model(Path(name)) if Path(name).is_dir() else None
    if reason is not None:
        raise UserError(f"{setting}={name!r} {reason}")


def check_model_folder(folder: Path, setting: str) -> None:
    """Refuse a folder from which training cannot start.

    Args:
        folder: Folder of the model.
        setting: Key or option that names the folder, for messages.
    """
    if not folder.is_dir():
        remedy = _model_remedy(folder) or how_to_get(folder)
        raise UserError(f"{setting}={str(folder)!r} is not a folder; {remedy}")
    reason = reason_against_model(folder)
    if reason is not None:
        raise UserError(f"{setting}={str(folder)!r} {reason}")
    patterns_of = {
        "config.json": ["config.json"],
        "weights (*.safetensors)": ["*.safetensors"],
        "tokenizer (tokenizer.json or tokenizer_config.json)": ["tokenizer.json", "tokenizer_config.json"],
    }
    for content, patterns in patterns_of.items():
        if not _matches(folder, patterns):
            raise UserError(f"{setting}={str(folder)!r} has no {content}; save model and tokenizer there")
    check_no_other_weights(folder, hf_config(folder))


def _matches(folder: Path, patterns: Iterable[str]) -> bool:
    """True if something in the folder matches one of the patterns."""
    return any(path for pattern in patterns for path in folder.glob(pattern))


def reason_against_model(folder: Path) -> str | None:
    """Explain why a folder is no model folder, with the remedy.

    Returns:
        A message without its subject, such as "is a PEFT adapter, ...". None if the folder has a config.json,
        or if its kind is not known.
    """
    if (folder / "config.json").is_file():
        return None
    if (folder / RECIPE_FILE).is_file():
        return f"has no model; this is a run's folder: give its model, {folder / 'hf'}"
    if (folder / "adapter_config.json").is_file():
        return (
            "is a PEFT adapter, without its base model; merge them: `nemo-grpo convert megatron-to-hf "
            "--megatron-checkpoint DIR --lora merge --base BASE ...` of the run's checkpoint, or in PEFT "
            "PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(OUT)"
        )
    if not _matches(folder, MEGATRON):
        return None
    return (
        "has no model; this is a Megatron checkpoint: convert it with `nemo-grpo convert megatron-to-hf "
        f"--megatron-checkpoint {folder} --hf-config BASE_MODEL --output MODEL`, and give MODEL"
    )


def check_data(recipe: Recipe) -> Findings:
    """Check that the files of the recipe's task exist and have enough problems, and count the problems."""
    config = recipe.nemo_grpo.task

    absent_files = missing_files(recipe)
    to_prepare = tuple(file for file in absent_files if _is_prepared(file))
    errors = tuple(remedies(file for file in absent_files if file not in to_prepare))
    if absent_files or not isinstance(config, FileTaskConfig):
        return Findings(errors, to_prepare)

    try:
        check_columns(config)
        task = config.build()
        _take_first_problems(recipe, task)
        file_problems = listed_problems(config, "train_files")
        held_out = listed_problems(config, "validation_files")
    except UserError as error:
        return Findings((str(error),))
    training_problems = not_held_out(file_problems, held_out)

    counts = []
    if file_problems:
        counts.append(f"{len(file_problems)} problems in train_files")
    if held_out:
        counts.append(f"{len(held_out)} problems in validation_files")
    summary = ", ".join(counts)
    if training_problems:
        num_prompts = recipe.grpo.max_num_steps * recipe.grpo.num_prompts_per_step
        summary += f": {num_prompts / len(training_problems):.3g} epochs of training"
    notes = tuple(data_notes(recipe, task, file_problems, training_problems))
    return Findings(notes=notes, found=summary)


def _take_first_problems(recipe: Recipe, task: Task) -> None:
    """Take problems as a run does: a task then refuses files that have too few."""
    grpo = recipe.grpo
    task.train_problem(0, grpo.seed)
    if grpo.validates and grpo.max_val_samples is not None:
        task.validation_problems(grpo.max_val_samples)


def missing_files(recipe: Recipe) -> list[str]:
    """List the files that the recipe's task names and this machine does not have."""
    task = recipe.nemo_grpo.task
    files = [*getattr(task, "files", ()), getattr(task, "corpus", None)]
    return [file for file in files if file and not Path(file).exists()]


def _is_prepared(file: str) -> bool:
    """True if `nemo-grpo data prepare` writes a file of this name."""
    # Imported late: the import takes 40 ms, and most recipes have all of their files.
    from nemo_grpo.data import SOURCES

    return Path(file).suffix == ".jsonl" and Path(file).stem in SOURCES


def remedies(missing: Iterable[str]) -> Iterator[str]:
    """Yield error messages for missing files, with the remedy.

    Files of one folder that `nemo-grpo data prepare` writes share a message. Each other file has its own.
    """
    prepared: dict[str, list[str]] = {}
    for file in dict.fromkeys(missing):
        path = Path(file)
        model_remedy = _model_remedy(path)
        if _is_prepared(file):
            prepared.setdefault(str(path.parent), []).append(path.stem)
        elif model_remedy is not None:
            yield f"policy.model_name={file} is missing; {model_remedy}"
        elif is_hub_name(file) and not path.suffix:
            name = file.rpartition("/")[2]
            yield (
                f"nemo_grpo.task: {file} is no file; of a data set on the Hub write one with datasets: "
                f"`load_dataset({file!r}, split='train').to_parquet('{name}.parquet')`, and name that"
            )
        else:
            yield (
                f"nemo_grpo.task: {file} is missing; correct the path, or write it: of problems, JSON lines "
                "or Parquet with question and answer"
            )
    for folder, names in prepared.items():
        yield (
            f"nemo_grpo.task: {len(names)} of its files are missing in {folder}; write them with "
            f"`nemo-grpo data prepare {' '.join(names)} --out {folder}`"
        )
