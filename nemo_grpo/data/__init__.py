"""The papers' data sets: where their problems come from, and their preparation as JSONL files."""

from nemo_grpo.data.manifest import verify
from nemo_grpo.data.preparation import Prepared, Request, check_copies, prepare
from nemo_grpo.data.sources import ALIASES, SOURCES, Source, find_source

__all__ = [
    "ALIASES",
    "SOURCES",
    "Prepared",
    "Request",
    "Source",
    "check_copies",
    "find_source",
    "prepare",
    "verify",
]
