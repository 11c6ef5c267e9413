"""``nemo-grpo slurm``: the job scripts of an installation without a clone."""

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from nemo_grpo.support.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Job scripts for an installation without the repository.")
app.callback()(lambda: None)  # a group, so that its only command has a name


@app.command()
def scripts(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="New folder, on a filesystem that all nodes share.", show_default=False
        ),
    ],
) -> None:
    """Write the job scripts, and the package's sources, which the workers of a job import from there.

    Set NEMO_GRPO_ROOT to the folder for `nemo-grpo launch`, or use slurm/train.sbatch in it by hand.

    Example: nemo-grpo slurm scripts jobs
    """
    import checkpoints_conv
    import nemo_grpo
    from nemo_grpo.support import shipped

    sources = {
        "slurm": shipped.folder("slurm"),
        "recipes": shipped.folder("recipes"),
        "nemo_grpo": Path(nemo_grpo.__file__).parent,
        "checkpoints_conv": Path(checkpoints_conv.__file__).parent,
    }
    ignored = shutil.ignore_patterns("__pycache__")
    try:
        folder.mkdir(parents=True)
        for name, source in sources.items():
            shutil.copytree(source, folder / name, ignore=ignored)
    except FileExistsError:
        raise UserError(f"{folder} exists; name a new folder") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error}); name another folder") from None
    typer.echo(
        f"{folder / 'slurm'}: job scripts; export NEMO_GRPO_ROOT={shlex.quote(str(folder.absolute()))} for "
        "nemo-grpo launch"
    )
