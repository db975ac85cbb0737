"""A stream of weights for one rank.

The weights equal those that the safetensors library reads. The reads are sequential, and memory is
allocated once. An error names its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pdmesh.core.loading.weight_header import WeightsUnreadable
from pdmesh.engine.vllm.loading.weight_stream import WeightStream, WeightStreamOptions
from pdmesh.engine.vllm.loading.window_reader import WeightFile
from tests.support.loading.weight_files import (
    NotedDisk,
    Shapes,
    header_of,
    num_data_bytes,
    write_sharded,
    write_weights,
)
from tests.support.waiting import wait_until

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

FIRST: Shapes = {
    "embed": ("F32", (40, 64)),
    "flags": ("BOOL", (3,)),
    "odd.norm": ("BF16", (65,)),  # not aligned, because three bytes precede this tensor
    "layer.0": ("BF16", (96, 32)),
    "none": ("F16", (0, 7)),
    "scale": ("F32", ()),
}
SECOND: Shapes = {"layer.1": ("F16", (100, 50)), "experts": ("I8", (7, 11)), "ids": ("I64", (9,))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sharded(tmp_path, [FIRST, SECOND])
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def stream_of(folder: Path, window_bytes: int, disk: NotedDisk | None = None) -> WeightStream:
    options = WeightStreamOptions(window_bytes, wait_s=60.0, open_file=(disk or NotedDisk()).open)
    return WeightStream(folder, names(folder), options=options)


def same(one: Any, other: Any) -> bool:
    """Compare bit by bit, because random bytes contain NaNs."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return bool(torch.equal(*bits))


def expected(folder: Path) -> dict[str, Any]:
    """All tensors as the safetensors library reads them."""
    return {
        name: tensor
        for file in names(folder)
        for name, tensor in safetensors.load_file(folder / file).items()
    }


@pytest.mark.req("S84", "S88")
@pytest.mark.parametrize("window_bytes", [1, 700, 10_000, 1 << 20])
def test_weights_equal_those_of_the_safetensors_library(folder: Path, window_bytes: int) -> None:
    whole, got = expected(folder), dict[str, bool]()
    for name, tensor in stream_of(folder, window_bytes):
        got[name] = same(tensor, whole[name])
    assert got == dict.fromkeys(whole, True)


@pytest.mark.req("S84", "S88")
def test_a_model_of_one_file_needs_no_index(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors", FIRST)
    whole = expected(tmp_path)
    assert all(same(tensor, whole[name]) for name, tensor in stream_of(tmp_path, 700))


@pytest.mark.req("S84", "S85")
@pytest.mark.parametrize("window_bytes", [700, 1 << 20])
def test_each_byte_is_read_once_and_in_the_order_of_files_and_bytes(
    folder: Path, window_bytes: int
) -> None:
    disk = NotedDisk()
    for _ in stream_of(folder, window_bytes, disk):
        pass
    heads = [len(header_of(shapes)) for shapes in (FIRST, SECOND)]
    data = [
        read
        for file, head in zip(names(folder), heads, strict=True)
        for read in disk.reads
        if read[0] == file and read[1] >= head
    ]
    assert data == [r for r in disk.reads if r in data], "a file was read before the one before"
    for file in names(folder):
        mine = [(offset, offset + n) for name, offset, n in disk.reads if name == file]
        assert mine[0][0] == 0
        assert all(end == begin for (_, end), (begin, _) in pairwise(mine)), "not sequential"
        assert mine[-1][1] == (folder / file).stat().st_size


@pytest.mark.req("S86")
def test_one_allocation_serves_all_files_and_is_shorter_than_they_are(folder: Path) -> None:
    stream = stream_of(folder, 4096)
    for _ in stream:
        pass
    report = stream.report
    assert (report.num_files, report.num_allocations) == (2, 1)
    assert report.num_windows > 4
    assert report.num_bytes == num_data_bytes(FIRST) + num_data_bytes(SECOND)
    assert report.buffer_bytes < report.num_bytes


@pytest.mark.req("S86")
def test_a_tensor_that_the_model_keeps_is_not_overwritten(folder: Path) -> None:
    """Some models collect the tensors of a layer before they use them."""
    whole, stream = expected(folder), stream_of(folder, 700)
    kept = list(stream)
    assert all(same(tensor, whole[name]) for name, tensor in kept)
    assert stream.report.num_allocations > 1


@pytest.mark.req("S87")
def test_the_next_window_is_read_while_a_window_is_copied(tmp_path: Path) -> None:
    """The model asks for its next tensor only after the disk has read the window after the present
    one.
    """
    write_weights(tmp_path / "model.safetensors", SECOND)
    disk = NotedDisk()
    for number, _ in enumerate(stream_of(tmp_path, 1, disk), 1):
        wait_for_reads(disk, 2 + min(number + 1, len(SECOND)))  # two reads are for the header


def wait_for_reads(disk: NotedDisk, count: int) -> None:
    wait_until(lambda: len(disk.reads) >= count, 60)


def test_a_file_that_was_cut_off_is_named_before_any_weight_is_used(folder: Path) -> None:
    path = folder / names(folder)[1]
    path.write_bytes(path.read_bytes()[:-1])
    disk = NotedDisk()
    with pytest.raises(WeightsUnreadable, match=f"{path.name}: is cut off"):
        next(iter(stream_of(folder, 700, disk)))


def test_a_file_that_is_cut_off_while_it_is_read_is_named(folder: Path) -> None:
    path, stream = folder / names(folder)[1], iter(stream_of(folder, 700))
    next(stream)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(WeightsUnreadable, match=f"{path.name}: ends before its last tensor"):
        list(stream)


@pytest.mark.parametrize("size", [0, 3, 9, 60])
def test_a_file_without_a_whole_header_is_named(tmp_path: Path, size: int) -> None:
    path = write_weights(tmp_path / "model.safetensors", FIRST)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(WeightsUnreadable, match=r"^model\.safetensors: "):
        next(iter(stream_of(tmp_path, 700)))


def test_an_error_of_the_disk_is_one_line_that_names_the_file(folder: Path) -> None:
    file = names(folder)[1]
    disk = NotedDisk(fails_at=(file, (folder / file).stat().st_size - 10))
    with pytest.raises(WeightsUnreadable) as raised:
        list(stream_of(folder, 700, disk))
    assert raised.value.message == f"{file}: cannot be read: Input/output error"
    with pytest.raises(WeightsUnreadable, match="missing: cannot be read: No such file"):
        list(WeightStream(folder, ["missing"]))


def test_a_tensor_that_its_file_lacks_is_named_with_the_file(folder: Path) -> None:
    files = names(folder)
    with pytest.raises(WeightsUnreadable, match=f"{files[0]}: the tensor lost is missing"):
        next(iter(WeightStream(folder, files, {"lost": files[0]})))


def test_a_read_that_never_ends_is_given_up_and_the_file_is_named(folder: Path) -> None:
    """A network disk may hang for ever. The thread that waits for the disk is abandoned."""
    file = names(folder)[1]
    stuck = StuckDisk(file, (folder / file).stat().st_size - 10)
    options = WeightStreamOptions(700, wait_s=0.2, open_file=stuck.open)
    try:
        with pytest.raises(WeightsUnreadable, match=f"{file}: a read did not end within 0.2 s"):
            list(WeightStream(folder, names(folder), options=options))
    finally:
        stuck.go_on.set()


class StuckDisk(NotedDisk):
    def __init__(self, file: str, limit: int) -> None:
        super().__init__()
        import threading

        self.go_on, self._file, self._limit = threading.Event(), file, limit

    def open(self, path: Path) -> Any:
        import contextlib

        @contextlib.contextmanager
        def opened() -> Iterator[WeightFile]:
            with super(StuckDisk, self).open(path) as file:
                yield Stuck(file, self, path.name == self._file)

        return opened()

    def wait_beyond(self, end: int) -> None:
        if end > self._limit:
            self.go_on.wait(60)


class Stuck:
    def __init__(self, file: WeightFile, disk: StuckDisk, is_slow: bool) -> None:
        self._file, self._disk, self._is_slow = file, disk, is_slow

    @property
    def num_bytes(self) -> int:
        return self._file.num_bytes

    def read_into(self, memory: memoryview, offset: int) -> int:
        if self._is_slow:
            self._disk.wait_beyond(offset + len(memory))
        return self._file.read_into(memory, offset)


def test_a_model_that_changes_loaded_weights_is_told_so(folder: Path) -> None:
    """All ranks of a machine share the memory, so another rank would load the changed weights."""
    changed = ((name, tensor.zero_()) for name, tensor in stream_of(folder, 1 << 20))
    with pytest.raises(WeightsUnreadable, match="changes loaded weights in place"):
        list(changed)


def test_the_thread_ends_with_the_stream_also_when_the_model_fails(folder: Path) -> None:
    import threading

    stream = iter(stream_of(folder, 700))
    next(stream)
    assert any(t.name == "pdmesh-weights" for t in threading.enumerate())
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: all(t.name != "pdmesh-weights" for t in threading.enumerate()), 60)
