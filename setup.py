"""Puts recipes, job scripts and lists of requirements, which lie beside the package in a clone, into it."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithRecipes(build_py):
    """`nemo_grpo.support.shipped` finds them in either place."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in ("recipes", "slurm", "requirements"):
            target = Path(self.build_lib) / "nemo_grpo" / folder
            shutil.rmtree(target, ignore_errors=True)  # an older build's
            shutil.copytree(folder, target)


setup(cmdclass={"build_py": WithRecipes})
