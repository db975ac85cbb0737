"""Tests which loader an engine gets, and which faults of its files are reported before vLLM
starts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.core.loading.weight_header import WeightsUnreadable
from pdmesh.core.loading.weights_loader import LoaderChoice, WeightsLoader
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.engine.vllm.engine import VllmEngine
from pdmesh.engine.vllm.loading.choice import (
    LOAD_FORMAT,
    check_weights,
    loader_arguments,
    loader_choice,
)
from pdmesh.engine.vllm.pooling.config import VllmPoolingConfig, pooling_arguments
from tests.support.loading.weight_files import Shapes, write_sharded, write_weights

OURS, VLLMS = LoaderChoice(True, ""), LoaderChoice(False, "")
FILES: list[Shapes] = [{"a": ("F32", (4,))}, {"b": ("F32", (5,))}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sharded(tmp_path, FILES)
    return tmp_path


@pytest.mark.req("S84")
def test_vllm_is_told_only_of_our_loader(tmp_path: Path) -> None:
    assert loader_arguments(VLLMS) == {}
    assert loader_arguments(OURS)["load_format"] == LOAD_FORMAT
    generating = VllmConfig("d", 1, tmp_path, "m", weights_loader=WeightsLoader.FILE_ORDER)
    assert generating.loader.is_file_order
    assert not replace(generating, weights_loader=WeightsLoader.VLLM).loader.is_file_order
    pooling = VllmPoolingConfig("p", 1, tmp_path, "m", weights_loader=WeightsLoader.FILE_ORDER)
    assert pooling_arguments(pooling).items() >= loader_arguments(OURS).items()


def test_the_storage_of_a_folder_that_does_not_exist_is_that_of_its_parent(tmp_path: Path) -> None:
    known = loader_choice(WeightsLoader.AUTO, tmp_path)
    assert loader_choice(WeightsLoader.AUTO, tmp_path / "missing") == known


def test_a_whole_model_passes(folder: Path) -> None:
    check_weights(OURS, folder)


def test_a_file_that_is_cut_off_or_missing_is_named_before_vllm_starts(folder: Path) -> None:
    last = max(folder.glob("*.safetensors"))
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    with pytest.raises(WeightsUnreadable, match=f"{last.name}: is cut off"):
        check_weights(OURS, folder)
    check_weights(VLLMS, folder)
    write_weights(last, {"other": ("F32", (5,))})
    with pytest.raises(WeightsUnreadable, match=f"{last.name}: the tensor b is missing"):
        check_weights(OURS, folder)
    last.unlink()
    with pytest.raises(WeightsUnreadable, match=f"{last.name}: is missing") as raised:
        check_weights(OURS, folder)
    assert (raised.value.reason, raised.value.field) == ("WEIGHTS_UNREADABLE", last.name)


async def test_an_engine_whose_model_is_damaged_does_not_start_and_names_the_file(
    folder: Path,
) -> None:
    (folder / "config.json").write_text("{}")
    last = max(folder.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1])
    config = VllmConfig("d", 1, folder, "m", weights_loader=WeightsLoader.FILE_ORDER)
    with pytest.raises(WeightsUnreadable, match=last.name):
        await VllmEngine(config).start()


def test_folders_that_vllm_reads_in_its_own_way_are_left_to_it(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(b"")
    check_weights(OURS, folder)


def test_a_folder_without_such_files_is_left_to_vllm(tmp_path: Path) -> None:
    check_weights(OURS, tmp_path)
