"""The model that a training began with: its name on the Hub and its license, from the cards that lie here."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from checkpoints_conv.formats.model_folder import read_config
from nemo_grpo.errors import UNREADABLE

CARD = "README.md"
TAG = "nemo_grpo"
"""Of the cards that this project writes; their base model is where their training began."""
LICENSE = ("license", "license_name", "license_link")
"""The fields of a card that name a license."""
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)", re.ASCII)
_MAX_LETTERS = 200


@dataclass(frozen=True)
class BaseModel:
    """Attributes: name: the Hub's, else a folder's alone.  is_on_hub.  license: known fields of `LICENSE`."""

    name: str
    is_on_hub: bool
    license: Mapping[str, str]


def base_model(stated: str | None, folder: Path) -> BaseModel:
    """What is known of a base model; the network is not asked.

    Args: stated: the recipe's ``policy.model_name``.  folder: whose config.json an export has.
    """
    if stated and is_hub_name(stated):
        return BaseModel(
            stated, True, _license(_head(_cached_card(stated))) or _license(_head(folder / CARD))
        )
    own = Path(stated) if stated and Path(stated).is_dir() else folder
    head = _head(own / CARD)
    if name := _on_hub(own, head):
        return BaseModel(name, True, _license(head) or _license(_head(_cached_card(name))))
    return BaseModel(Path(stated).name if stated else own.resolve().name, False, _license(head))


def is_hub_name(name: str) -> bool:
    """True for ORGANISATION/MODEL that is no path of this machine."""
    return _HUB_NAME.fullmatch(name) is not None and not os.path.exists(name)


def _on_hub(folder: Path, head: Mapping[str, Any]) -> str | None:
    """The name on the Hub of the model in a folder, or that from which this project trained it."""
    above = folder.resolve().parent
    if above.name == "snapshots" and (cached := _CACHED.fullmatch(above.parent.name)):
        return f"{cached[1]}/{cached[2]}"
    tags, config = head.get("tags"), folder / "config.json"
    stated = head.get("base_model") if isinstance(tags, list) and TAG in tags else None
    if stated is None and config.is_file():
        stated = read_config(config).get("_name_or_path")
    return stated if isinstance(stated, str) and is_hub_name(stated) else None


def _cached_card(name: str) -> Path | None:
    """The card of a model of the Hub, if it was downloaded."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, CARD)
    except ValueError:  # no name that the Hub allows
        return None
    return Path(found) if isinstance(found, str) else None


def _head(card: Path | None) -> dict[str, Any]:
    """The fields above a card's text; a card is not worth a failed export."""
    if card is None:
        return {}
    try:
        found = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8"), re.DOTALL)
        head = yaml.safe_load(found[1]) if found else None
    except (*UNREADABLE, yaml.YAMLError):
        return {}
    return head if isinstance(head, dict) else {}


def _license(head: Mapping[str, Any]) -> dict[str, str]:
    fields = {name: head.get(name) for name in LICENSE}
    return {
        name: value
        for name, value in fields.items()
        if isinstance(value, str) and value.isprintable() and len(value) <= _MAX_LETTERS
    }
