"""Tests which files of a model turn text into tokens, and when two models have equal files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdmesh import text_files
from pdmesh.text_files import BadTextFiles, is_text_file, read_text_files
from tests.fakes.tiny_model import write_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def test_weights_code_and_other_files_are_not_tokenizer_files(folder: Path) -> None:
    before = read_text_files(folder)
    for name in ("model.safetensors", "tokenization_evil.py", "README.md", ".tokenizer.json"):
        (folder / name).write_text("x")
        assert not is_text_file(name)
    assert read_text_files(folder) == before
    assert set(before.digests) == {
        "chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip


def test_named_templates_are_included_and_no_path_leads_out_of_the_folder(folder: Path) -> None:
    before = read_text_files(folder)
    named = folder / "additional_chat_templates" / "tool_use.jinja"
    named.parent.mkdir()
    named.write_text("x")
    after = read_text_files(folder)
    assert set(after.digests) - set(before.digests) == {"additional_chat_templates/tool_use.jinja"}
    assert after.vocabulary == before.vocabulary
    for name in (
        "../tokenizer.json", "/etc/tokenizer.json", "additional_chat_templates/../x.jinja",
        "additional_chat_templates/..jinja", "additional_chat_templates/a/b.jinja", "a/config.json",
        "tokenizer.json\n", "",
    ):  # fmt: skip
        assert not is_text_file(name), name


def test_another_template_changes_the_digest_but_not_the_vocabulary(folder: Path) -> None:
    before = read_text_files(folder)
    (folder / "chat_template.jinja").write_text("another")
    after = read_text_files(folder)
    assert after.digest != before.digest
    assert after.vocabulary == before.vocabulary
    (folder / "tokenizer.json").write_text("{}")
    assert read_text_files(folder).vocabulary != before.vocabulary


@pytest.mark.parametrize(
    "names", [["tekken.json"], ["tokenizer.model"], ["a.tiktoken"], ["vocab.json", "merges.txt"]]
)
def test_a_vocabulary_need_not_be_a_tokenizer_json(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text(name)
    (tmp_path / "config.json").write_text("{}")
    found = read_text_files(tmp_path)
    assert set(found.digests) == {*names, "config.json"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    assert set(read_text_files(tmp_path).digests) == {"tokenizer.json", "config.json"}


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadTextFiles, match="no tokenizer"):
        read_text_files(tmp_path)
    with pytest.raises(BadTextFiles, match="cannot be read"):
        read_text_files(tmp_path / "absent")


def test_more_bytes_than_any_model_needs_are_refused_unread(folder: Path) -> None:
    with (folder / "tekken.json").open("wb") as file:
        file.truncate(text_files.MAX_BYTES + 1)
    read_text_files(folder)  # beside tokenizer.json, the large file is not needed
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadTextFiles, match="bytes in"):
        read_text_files(folder)


def test_pieces_are_bounded_and_make_the_files_again(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(bytes(text_files.PIECE_BYTES + 1))
    (folder / "chat_template.jinja").write_bytes(b"")
    found = read_text_files(folder)
    files: dict[str, bytes] = {}
    for name, data in found.pieces():
        assert len(data) <= text_files.PIECE_BYTES
        files[name] = files.get(name, b"") + data
    assert files == {name: (folder / name).read_bytes() for name in found.digests}
