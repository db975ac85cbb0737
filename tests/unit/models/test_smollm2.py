"""A prepared model is used only if its files match. A failed preparation leaves no files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pdmesh.models import smollm2


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as `prepare` leaves it, with small files instead of the large ones."""

    def convert(_: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"weights")
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_verified_source", lambda: tmp_path / "source.gguf")
    monkeypatch.setattr(smollm2, "_convert", convert)
    directory = tmp_path / "models" / "smollm2"
    smollm2.prepare(directory)
    return directory


def test_prepared_files_are_used_unchanged(model: Path) -> None:
    assert smollm2.is_prepared(model)
    assert smollm2.ensure(model, report=pytest.fail) == model


def test_a_file_that_was_only_copied_is_still_trusted(model: Path) -> None:
    os.utime(model / "model.safetensors", (1, 1))
    assert smollm2.is_prepared(model)


@pytest.mark.parametrize("content", [b"Weights", b"shorter", b""])
def test_a_file_with_other_content_is_not_trusted(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    assert not smollm2.is_prepared(model)


def test_a_missing_file_or_another_source_causes_a_new_preparation(model: Path) -> None:
    manifest = model / "pdmesh-manifest.json"
    data = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**data, "source_sha256": "0" * 64}))
    assert not smollm2.is_prepared(model)
    manifest.write_text(json.dumps(data))
    (model / "config.json").unlink()
    assert not smollm2.is_prepared(model)
    assert not smollm2.is_prepared(model / "nowhere")


def test_a_failed_conversion_keeps_the_old_model_and_leaves_no_files(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        smollm2.prepare(model)
    assert smollm2.is_prepared(model)
    assert [path.name for path in model.parent.iterdir()] == [model.name]


def test_a_source_with_another_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wheel:
        files = (
            type("File", (), {"name": smollm2.GGUF_FILE, "locate": lambda _: tmp_path / "x"})(),
        )

    (tmp_path / "x").write_bytes(b"not the model")
    monkeypatch.setattr(smollm2, "distribution", lambda _: Wheel())
    with pytest.raises(smollm2.CannotPrepare, match="its hash differs"):
        smollm2.prepare(tmp_path / "model")
    assert not (tmp_path / "model").exists()
