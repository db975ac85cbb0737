"""Tests how the ranks of a node load a model's weights together.

All ranks must get equal weights, the node must read each byte only once, and no rank may wait
forever for one that is gone (S84, S85). The ranks are processes that talk over gloo, like vLLM's
ranks. They need torch, but not vLLM.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.loading.weight_files import Shapes, write_sharded
from tests.support.loading.weight_ranks import RankOrder, RankResult, digest_of, run_ranks

pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

FILES: Sequence[Shapes] = [
    {f"{file}.{layer}": ("BF16", (128, 700 + layer)) for layer in range(6)}
    | {f"{file}.n": ("F32", (5,))}
    for file in range(3)
]
WINDOW_BYTES = 400_000
# A rank reads about this much for its own pipes and JSON. A rank that also read a file would read a
# megabyte.
OTHER_READS = 200_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("weights")
    write_sharded(made, FILES)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def orders(folder: Path, tmp_path: Path, size: int, **more: Any) -> list[RankOrder]:
    """One order for each rank. Each value in `more` is a list with one item for each rank."""
    return [
        RankOrder(
            rank,
            size,
            str(tmp_path / "store"),
            str(folder),
            names(folder),
            WINDOW_BYTES,
            **{key: values[rank] for key, values in more.items()},
        )
        for rank in range(size)
    ]


def all_of(results: Sequence[RankResult | None]) -> list[RankResult]:
    found = [result for result in results if result is not None]
    assert len(found) == len(results), "a rank died"
    return found


@pytest.mark.req("S84", "S85", "S86")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_get_equal_weights_and_each_byte_is_read_once_on_the_node(
    folder: Path, tmp_path: Path, size: int
) -> None:
    results = all_of(run_ranks(orders(folder, tmp_path, size)))
    expected = {
        name: digest_of(tensor)
        for file in names(folder)
        for name, tensor in safetensors.load_file(folder / file).items()
    }
    file_bytes = sum((folder / file).stat().st_size for file in names(folder))
    for result in results:
        assert result.error == ""
        assert result.digests == expected
        assert result.order == results[0].order
        assert result.report["num_allocations"] == 1
        assert result.report["buffer_bytes"] < file_bytes / 3
    reader, *others = results
    assert sum(num_bytes for _, _, num_bytes in reader.reads) == file_bytes
    assert file_bytes <= reader.rchar < file_bytes + OTHER_READS
    for other in others:
        assert other.reads == []
        assert other.rchar < OTHER_READS < min((folder / f).stat().st_size for f in names(folder))


@pytest.mark.req("S85")
def test_the_same_ranks_load_a_second_model(folder: Path, tmp_path: Path) -> None:
    """The same group of ranks loads a draft model after the main model."""
    results = all_of(run_ranks(orders(folder, tmp_path, 2, num_loads=[2, 2])))
    file_bytes = sum((folder / file).stat().st_size for file in names(folder))
    assert [result.error for result in results] == ["", ""]
    assert results[0].digests == results[1].digests
    assert sum(num_bytes for _, _, num_bytes in results[0].reads) == 2 * file_bytes
    assert results[1].reads == []


@pytest.mark.req("S86")
def test_tensors_that_one_rank_keeps_are_not_overwritten(folder: Path, tmp_path: Path) -> None:
    results = all_of(run_ranks(orders(folder, tmp_path, 2, keeps=[False, True])))
    assert results[0].digests == results[1].digests
    assert results[1].report["num_allocations"] > 1


@pytest.mark.req("S85")
def test_an_error_of_the_disk_ends_every_rank_with_one_line_that_names_the_file(
    folder: Path, tmp_path: Path
) -> None:
    file = names(folder)[1]
    fails_at = (file, (folder / file).stat().st_size // 2)
    results = all_of(run_ranks(orders(folder, tmp_path, 2, fails_at=[fails_at, None])))
    for result in results:
        assert result.error == "WeightsUnreadable"
        assert result.message == f"{file}: cannot be read: Input/output error"


@pytest.mark.req("S85")
def test_a_file_that_was_cut_off_ends_every_rank(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_sharded(folder, FILES)
    path = folder / names(folder)[2]
    path.write_bytes(path.read_bytes()[:-1])
    for result in all_of(run_ranks(orders(folder, tmp_path, 2))):
        assert result.error == "WeightsUnreadable"
        assert result.message.startswith(f"{path.name}: is cut off")
        assert result.order == []


@pytest.mark.req("S85")
@pytest.mark.fault("F37")
@pytest.mark.parametrize("dead", [0, 1], ids=["the reader", "another rank"])
def test_a_rank_that_is_killed_ends_the_others_at_once(
    folder: Path, tmp_path: Path, dead: int
) -> None:
    dies_at = [5 if rank == dead else -1 for rank in range(3)]
    results = run_ranks(orders(folder, tmp_path, 3, dies_at=dies_at, wait_s=[600.0] * 3))
    assert results[dead] is None
    for rank, result in enumerate(results):
        if rank != dead:
            assert result is not None
            assert result.error == "RankLost"


@pytest.mark.req("S85")
def test_a_reader_that_hangs_is_given_up_in_a_bounded_time(folder: Path, tmp_path: Path) -> None:
    """A frozen process keeps its connections, so the other rank can only notice the lack of
    progress.
    """

    def give_up(ranks: list[subprocess.Popen[str]]) -> None:
        ranks[1].wait(120)
        ranks[0].kill()

    orders_of_two = orders(folder, tmp_path, 2, wait_s=[2.0] * 2, freezes_at=[5, -1])
    reader, other = run_ranks(orders_of_two, meanwhile=give_up)
    assert reader is None
    assert other is not None
    assert other.error == "RankLost"
    assert len(other.order) < sum(map(len, FILES))
