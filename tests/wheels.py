"""The wheel, and a folder of packages as pip installs it; the dependencies are this environment's."""

import shutil
from pathlib import Path

from processes import ROOT, output_of, python

SHIPPED = ("recipes", "slurm", "requirements")
"""Folders beside the package that the wheel has within it."""


def copy_sources(folder: Path) -> Path:
    """A copy of what a wheel is built from."""
    for part in ("nemo_grpo", "checkpoints_conv", *SHIPPED):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, folder)
    return folder


def build_wheel(sources: Path, folder: Path) -> Path:
    """By the backend that pip runs."""
    options = ("--no-deps", "--no-build-isolation", "--quiet")
    output_of(python("-m", "pip", "wheel", *options, "-w", folder, sources))
    (found,) = folder.glob("*.whl")
    return found


def install(wheel: Path, folder: Path) -> Path:
    """Into a folder for PYTHONPATH."""
    output_of(python("-m", "pip", "install", "--no-deps", "--quiet", "--target", folder, wheel))
    return folder
