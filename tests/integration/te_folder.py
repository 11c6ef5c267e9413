"""Where ``make venv`` puts Transformer Engine's Python code, out of the way of ``import``."""

import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "transformer_engine"
