"""NeMo-RL is for Python 3.12 and newer, whose typed dictionaries pydantic takes: import this first."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "nemo_grpo" / "rehearsal" / "site"))

from rehearsal_hooks import use_newer_typing

use_newer_typing()
