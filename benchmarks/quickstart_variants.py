"""Every variant on the quickstart task, three seeds from one warm start: ``nemo-grpo compare``, all names.

    python benchmarks/quickstart_variants.py [any option of nemo-grpo compare, or key=value]

Repeat the command to continue; results are in runs/variants.
"""

import subprocess
import sys
from pathlib import Path

from nemo_grpo.variants import VARIANTS

ROOT = Path(__file__).parents[1]


def main() -> int:
    command = [sys.executable, "-m", "nemo_grpo.cli", "compare", "recipes/quickstart.yaml"]
    command += ["--variants", ",".join(VARIANTS), "--seeds", "3", "--jobs", "2", "--out", "runs/variants"]
    return subprocess.run([*command, *sys.argv[1:]], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
