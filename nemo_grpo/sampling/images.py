"""Images of prompts: what they are, and how many tokens they take."""

import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from nemo_grpo.support.errors import UserError, first_line

Images = tuple[str, ...]
"""Paths of one prompt's images, in the order of their placeholders."""
Size = tuple[int, int]
"""Width and height in pixels."""


@cache
def image_digest(path: str) -> str:
    """A hash of the file's content."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def read_image(path: str) -> Any:
    """The picture in RGB (PIL).  Raises: UserError: it cannot be read."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a picture ({first_line(error)}); prepare the data set again") from error


class ImageTokens:
    """Number of tokens that a model's processor makes of images; depends on their sizes alone.

    Args:   model: its folder, with the processor's files.
    Raises: UserError: the processor cannot be loaded.
    """

    def __init__(self, model: Path) -> None:
        from transformers import AutoProcessor

        try:
            self._processor = AutoProcessor.from_pretrained(model, local_files_only=True)
            self._token = self._processor.image_token
        except Exception as error:  # of many kinds: missing files, missing torchvision, a text model
            raise UserError(
                f"--model {model}: no processor for images ({first_line(error)}); give the folder of a "
                "vision-language model with its processor's files, and install torchvision"
            ) from error
        self._of_sizes = lru_cache(maxsize=None)(self._count)

    def __call__(self, images: Sequence[str]) -> int:
        """Tokens beyond the one placeholder that a prompt has for each image."""
        from PIL import Image

        sizes = []
        for path in images:
            with Image.open(path) as image:  # reads the header alone
                sizes.append(image.size)
        return self._of_sizes(tuple(sizes))

    def _count(self, sizes: tuple[Size, ...]) -> int:
        from PIL import Image

        blank = [Image.new("RGB", size) for size in sizes]
        expanded = self._processor(text=[self._token * len(blank)], images=blank)["input_ids"][0]
        return len(expanded) - len(blank)
