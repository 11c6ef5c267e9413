"""Images of prompts: reading, hashing, and counting their tokens."""

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
    """Hash the file's content."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def read_image(path: str) -> Any:
    """Read the picture in RGB (PIL)."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a picture ({first_line(error)}); prepare the data set again") from error


class ImageTokens:
    """Counts the tokens that a model's processor makes of images, from their sizes alone.

    Args:
        model: its folder, with the processor's files.
    """

    def __init__(self, model: Path) -> None:
        from transformers import AutoProcessor

        try:
            self._processor = AutoProcessor.from_pretrained(model, local_files_only=True)
            self._token = self._processor.image_token
        # Many kinds of errors end here: missing files, missing torchvision, a text-only model.
        except Exception as error:
            raise UserError(
                f"--model {model}: no processor for images ({first_line(error)}); give the folder of a "
                "vision-language model with its processor's files, and install torchvision"
            ) from error
        self._of_sizes = lru_cache(maxsize=None)(self._count)

    def __call__(self, images: Sequence[str]) -> int:
        """Count tokens beyond the one placeholder that a prompt has for each image."""
        from PIL import Image

        sizes = []
        for path in images:
            # `Image.open` reads only the header, because a benchmark may have gigabytes of pictures.
            with Image.open(path) as image:
                sizes.append(image.size)
        return self._of_sizes(tuple(sizes))

    def _count(self, sizes: tuple[Size, ...]) -> int:
        from PIL import Image

        # Each model has its own rule, so its processor counts the tokens, on blank pictures of these sizes.
        blank_images = [Image.new("RGB", size) for size in sizes]
        placeholders = self._token * len(blank_images)
        expanded = self._processor(text=[placeholders], images=blank_images)["input_ids"][0]
        return len(expanded) - len(blank_images)
