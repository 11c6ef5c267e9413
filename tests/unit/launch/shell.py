"""The job scripts' pieces in bash, with stubs in place of Slurm's programs."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def bash(script, *, check=True, **options):
    """Run a script to its end; with ``check`` it has to end well."""
    command = ["bash", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=check, **options)


def write_programs(folder, **texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
