"""The input text of a command is bounded by its number of bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh.cli import texts
from pdmesh.cli.errors import CommandFailed


def test_the_bound_counts_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_BYTES", 8)
    file = tmp_path / "text"
    file.write_text("\u00e4" * 4)
    assert len(texts.text_of(file)) == 4
    file.write_text("\u00e4" * 5)
    with pytest.raises(CommandFailed, match="longer than 8 bytes"):
        texts.text_of(file)
