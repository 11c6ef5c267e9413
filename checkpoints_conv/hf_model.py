"""A Hugging Face model whose weights are read: opened, and compared with its config.json."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from checkpoints_conv.formats.pieces import Buffer, same
from checkpoints_conv.formats.safetensors_io import SafetensorsFolder
from nemo_grpo.models import Family, family_for
from nemo_grpo.models.family import refuse_untied
from nemo_grpo.models.parts import HF_OUTPUT
from nemo_grpo.support.model_folder import check_no_other_weights, hf_config


@contextmanager
def open_model(folder: Path) -> Iterator[tuple[Family, SafetensorsFolder]]:
    """Within the block, a model's family and its weights.

    Raises: UserError: the weights do not fit config.json or are not all that transformers loads, or a file is
            damaged.
    """
    config = hf_config(folder)
    family = family_for(config)
    check_no_other_weights(folder, config)
    with closing(SafetensorsFolder(folder, family.pieces, family.aliases)) as weights:
        family.check_hf(weights.shapes)
        if family.tied and HF_OUTPUT in weights.tensors:
            _check_tied(weights, family.hf_embedding)
        yield family, weights


def _check_tied(weights: SafetensorsFolder, name: str) -> None:
    if weights.shapes[HF_OUTPUT] != weights.shapes[name]:
        refuse_untied()
    first, second = Buffer(), Buffer()
    rows, step = weights.shapes[name][0], 64
    for row in range(0, rows, step):
        count = min(step, rows - row)
        embedding = weights.read_rows(name, row, count, first)
        if not same(embedding, weights.read_rows(HF_OUTPUT, row, count, second)):
            refuse_untied()
