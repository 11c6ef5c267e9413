"""What a rehearsal of a recipe would train: ``FOLDER/recipe.yaml``, a small model and its problems.

    small_recipe.py RECIPE FOLDER NEMO_RL

Runs in a Python with NeMo-RL's packages, whose transformers reads what is written here.
"""

import sys
from pathlib import Path

from nemo_grpo.rehearsal.environment import Stack
from nemo_grpo.rehearsal.stages import prepare

MOST_RANKS = 2


def main(recipe, folder, nemo_rl):
    prepare(recipe, [], Stack(Path(sys.executable), nemo_rl, None), folder, MOST_RANKS)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
