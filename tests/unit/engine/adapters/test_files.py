"""An adapter's files are read within bounds. Their content alone determines the digest."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from pdmesh.engine.adapters.files import (
    SETTINGS_FILE,
    WEIGHTS_FILE,
    model_shapes,
    read_adapter,
    tensor_shapes,
)
from pdmesh.errors import AdapterUnusable
from tests.fakes.lora_adapters import safetensors, write_adapter


def test_the_digest_depends_only_on_the_content(tmp_path: Path) -> None:
    digest = write_adapter(tmp_path / "a", 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "README.md").write_text("not read")
    assert read_adapter(tmp_path / "b").digest == digest
    assert write_adapter(tmp_path / "c", 2) != digest
    settings = tmp_path / "b" / SETTINGS_FILE
    settings.write_text(settings.read_text().replace('"r": 4', '"r": 8'))
    assert read_adapter(tmp_path / "b").digest != digest


def test_a_copy_holds_what_was_hashed_and_nothing_else(tmp_path: Path) -> None:
    digest = write_adapter(tmp_path / "a", 1)
    (tmp_path / "a" / "adapter_model.bin").write_text("a pickle")
    facts = read_adapter(tmp_path / "a", tmp_path / "copy")
    assert facts.digest == digest == read_adapter(tmp_path / "copy").digest
    assert {p.name for p in (tmp_path / "copy").iterdir()} == {SETTINGS_FILE, WEIGHTS_FILE}
    assert facts.rank == 4
    assert facts.num_bytes == sum(p.stat().st_size for p in (tmp_path / "copy").iterdir())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (SETTINGS_FILE, None, "No such file"),
        (WEIGHTS_FILE, None, "No such file"),
        (SETTINGS_FILE, b"{", "has no usable adapter"),
        (SETTINGS_FILE, b"[]", "not a JSON object"),
        (SETTINGS_FILE, b"[" * 100_000, "has no usable adapter"),
        (SETTINGS_FILE, b"\xff", "has no usable adapter"),
        (SETTINGS_FILE, b" " * (2 << 20), "at most 1048576"),
        (WEIGHTS_FILE, b"", "has no usable adapter"),
        (WEIGHTS_FILE, struct.pack("<Q", 1 << 60), "header of 1152921504606846976"),
        (WEIGHTS_FILE, struct.pack("<Q", 2) + b"[]", "has no usable adapter"),
        (WEIGHTS_FILE, struct.pack("<Q", 10) + b'{"a": "b"}', "has no usable adapter"),
        (WEIGHTS_FILE, struct.pack("<Q", 99) + b"{", "has no usable adapter"),
    ],
)
def test_anything_else_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    write_adapter(tmp_path / "a", 1)
    if content is None:
        (tmp_path / "a" / name).unlink()
    else:
        (tmp_path / "a" / name).write_bytes(content)
    with pytest.raises(AdapterUnusable) as refused:
        read_adapter(tmp_path / "a")
    assert said in refused.value.message
    assert len(refused.value.message) < 1024
    assert "\n" not in refused.value.message


def test_the_shapes_of_a_model_are_those_of_all_its_files(tmp_path: Path) -> None:
    import numpy as np

    (tmp_path / "config.json").write_text("{}")
    for part in (1, 2):
        weights = {f"layer{part}.weight": np.zeros((part, 3), np.float32)}
        (tmp_path / f"model-{part}.safetensors").write_bytes(safetensors(weights))
    assert model_shapes(tmp_path) == {"layer1.weight": (1, 3), "layer2.weight": (2, 3)}
    assert tensor_shapes(tmp_path / "model-1.safetensors") == {"layer1.weight": (1, 3)}
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    assert model_shapes(tmp_path) is None
