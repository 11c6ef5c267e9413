"""A folder appears under its name when it is complete, and replaces an older one."""

from pathlib import Path

import pytest

from nemo_grpo.support.files import publish_folder


def folder_with(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_published_folder_replaces_the_old_one_and_its_leftovers(tmp_path):
    target = tmp_path / "out[1]"
    publish_folder(folder_with(tmp_path / "unfinished", "old"), target)
    folder_with(tmp_path / "tmp_removed_out[1].17", "older")  # of a killed attempt
    folder_with(tmp_path / "tmp_removed_out[1]b.17", "of another")
    publish_folder(folder_with(tmp_path / "unfinished", "new"), target)
    assert (target / "file").read_text() == "new"
    assert names(tmp_path) == ["out[1]", "tmp_removed_out[1]b.17"]


def test_an_end_between_the_renames_loses_neither_folder(tmp_path, monkeypatch):
    target = folder_with(tmp_path / "out", "old")
    rename = Path.rename

    def killed(self, new):
        if self.name == "unfinished":
            raise KeyboardInterrupt
        return rename(self, new)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        publish_folder(folder_with(tmp_path / "unfinished", "new"), target)
    texts = sorted((path / "file").read_text() for path in tmp_path.iterdir())
    assert texts == ["new", "old"]
