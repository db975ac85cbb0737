"""An instance sends its model's text files to gateways over gRPC, within bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdmesh import text_files
from pdmesh.errors import InvalidRequest, Overloaded, Unavailable
from pdmesh.instance.legs.model_text import ModelTextSource
from pdmesh.text_files import TextFiles, read_text_files
from tests.fakes.tiny_model import write_tiny_model


@pytest.fixture
def text(tmp_path: Path) -> TextFiles:
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "tokenizer.json").write_bytes(b"x" * (3 * text_files.PIECE_BYTES))
    return read_text_files(folder)


async def collected(pieces: AsyncIterator[Any]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    async for piece in pieces:
        files[piece.name] = files.get(piece.name, b"") + piece.data
    return files


async def test_all_files_come_in_pieces(text: TextFiles) -> None:
    files = await collected(ModelTextSource(text).pieces(text.digest))
    assert files == {name: (text.folder / name).read_bytes() for name in text.digests}


async def test_a_caller_with_another_digest_gets_no_files(text: TextFiles) -> None:
    with pytest.raises(InvalidRequest):
        await collected(ModelTextSource(text).pieces("0" * 32))
    with pytest.raises(InvalidRequest):
        await collected(ModelTextSource(None).pieces(""))


async def test_only_a_few_gateways_read_at_once_and_one_that_leaves_makes_room(
    text: TextFiles,
) -> None:
    source = ModelTextSource(text)
    readers = [source.pieces(text.digest) for _ in range(4)]
    for reader in readers:
        await anext(reader)
    with pytest.raises(Overloaded):
        await anext(source.pieces(text.digest))
    await readers[0].aclose()
    assert await collected(source.pieces(text.digest))


async def test_a_file_that_is_gone_is_an_error_that_may_be_retried(text: TextFiles) -> None:
    (text.folder / "tokenizer.json").unlink()
    with pytest.raises(Unavailable):
        await collected(ModelTextSource(text).pieces(text.digest))
