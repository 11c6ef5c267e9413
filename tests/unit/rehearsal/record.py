"""Record what a real rehearsal leaves behind, for `recordings.py`: NeMo-RL, Ray and Megatron, a tiny model.

    NEMO_RL_SRC=DIR PYTHONPATH=. .venv-nemo-rl/bin/python tests/unit/rehearsal/record.py [NAME...]

Writes ``recorded/NAME``; the folder's path is ``FOLDER`` in its files.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from recordings import FOLDER, RECORDED, RECORDINGS, ROOT, SKELETON

from nemo_grpo.rehearsal import checks, model, stages
from nemo_grpo.rehearsal.environment import find_stack

SIZES = {"HEAD_DIM": 8, "FFN": 64}
TEXTS = (".yaml", ".json", ".jsonl")
OF_A_MODEL = (".json", ".jinja", ".safetensors")
OF_AN_EXPORT = ("config.json", "model.safetensors")


def main(names):
    for name in names or RECORDINGS:
        with tempfile.TemporaryDirectory() as scratch:
            rehearsal = rehearse(Path(scratch) / "run", *RECORDINGS[name])
            found = checks.stages(rehearsal)
            sys.stdout.write("\n  ".join([name, *map(str, found), ""]))
            if not all(stage.ok for stage in found):
                return 1
            shutil.rmtree(RECORDED / name, ignore_errors=True)
            keep(rehearsal, RECORDED / name)
    return 0


def rehearse(folder, recipe, *overrides):
    """A rehearsal whose model is smaller still: the stand-in samples with any head size."""
    for name, size in SIZES.items():
        setattr(model, name, size)
    stack = find_stack(None, Path(sys.executable), None, sampler=True)
    rehearsal = stages.prepare(ROOT / "recipes" / recipe, overrides, stack, folder, 4)
    stages.train(rehearsal)
    return rehearsal


def keep(rehearsal, target):
    """Copy what the evidence reads."""
    for path in kept(rehearsal):
        copy = target / path.relative_to(rehearsal.folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in TEXTS:
            copy.write_text(path.read_text().replace(str(rehearsal.folder), FOLDER))
        else:
            shutil.copy(path, copy)
    (target / SKELETON).write_text(json.dumps({"stopped_after": rehearsal.stopped_after}))


def kept(rehearsal):
    folder = rehearsal.folder
    yield folder / "recipe.yaml"
    yield from (folder / "problems").glob("*")
    yield from (path for path in (folder / "model").glob("*") if path.suffix in OF_A_MODEL)
    yield from (path for path in (folder / "hf-of-stop").glob("*") if path.name in OF_AN_EXPORT)
    yield rehearsal.small.run_dir / "metrics.jsonl"
    yield from Path(str(rehearsal.small.logger.log_dir)).glob("exp_*/*.jsonl")
    checkpoints = rehearsal.small.checkpoint_dir
    yield from checkpoints.glob("step_*/training_info.json")
    yield from checkpoints.glob("step_*/policy/tokenizer/config.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
