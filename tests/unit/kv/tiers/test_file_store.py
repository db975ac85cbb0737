"""The file store has each acknowledged block as a whole, or finds that it is bad and removes it.

The store never returns half a block or another block.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pdmesh.core.kv.tiers.file_eviction import StoredFile
from pdmesh.kv.tiers.file_format import (
    HEADER_BYTES,
    BadBlockFile,
    checksum_of,
    identity_of,
)
from pdmesh.kv.tiers.file_store import FileStore
from pdmesh.kv.transport.base import ByteArray

BLOCK = 1000
_OWN_FILES = {".evicting", ".count"}
OWNER, OTHER = b"\x01" * 8, b"\x02" * 8
FILE = HEADER_BYTES + BLOCK


def name_of(key: int) -> bytes:
    return key.to_bytes(16, "big")


def data_of(key: int) -> ByteArray:
    return np.random.default_rng(key).integers(0, 256, BLOCK, np.uint8)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


Make = Callable[..., FileStore]


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Make:
    def made(
        model: str = "model", rank: int = 0, quota: int = 100 * FILE, owner_share: float = 1.0
    ) -> FileStore:
        identity = identity_of(model, rank, 2)
        return FileStore(tmp_path, identity, BLOCK, quota, clock, owner_share=owner_share)

    return made


def put(store: FileStore, key: int, owner: bytes = OWNER, position: int = 0) -> bool:
    data = data_of(key)
    return store.put(name_of(key), owner, data, checksum_of(data), position)


def get(store: FileStore, key: int, owner: bytes = OWNER) -> bool:
    """Say whether a good block is there. If so, check that it has the right bytes."""
    out: ByteArray = np.zeros(BLOCK, np.uint8)
    try:
        found = store.get(name_of(key), owner, out) is not None
    except BadBlockFile:
        return False
    assert not found or np.array_equal(out, data_of(key))
    return found


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in _OWN_FILES)


def keys(store: FileStore) -> set[int]:
    return {int.from_bytes(f.name, "big") for f in store.scan()}


@pytest.mark.req("S76", "S105")
def test_another_process_of_the_same_model_gets_the_stored_blocks(make: Make) -> None:
    first, second = make(), make()
    assert put(first, 1)
    assert not put(second, 1), "it was stored already"
    assert get(second, 1)
    assert not get(second, 2)
    assert second.contains([name_of(1), name_of(2), name_of(1)], OWNER) == 0b001


@pytest.mark.req("S76")
@pytest.mark.fault("F34", "F40")
def test_no_block_is_shared_across_models_ranks_or_owners(make: Make) -> None:
    store = make()
    assert put(store, 1)
    assert not get(make(model="another"), 1)
    assert not get(make(rank=1), 1)
    assert not get(store, 1, OTHER)


@pytest.mark.fault("F34")
@pytest.mark.parametrize("byte", [*range(0, HEADER_BYTES, 3), HEADER_BYTES, FILE // 2, FILE - 1])
def test_a_flipped_bit_anywhere_is_counted_and_the_file_removed(
    make: Make, tmp_path: Path, byte: int
) -> None:
    store = make()
    assert put(store, 1)
    (path,) = files(tmp_path)
    content = bytearray(path.read_bytes())
    content[byte] ^= 0x10
    path.write_bytes(content)
    assert not get(store, 1)
    assert store.num_corrupt == 1
    assert files(tmp_path) == []
    assert store.bytes_used == 0
    assert put(store, 1), "computed again and stored again"
    assert get(store, 1)


@pytest.mark.fault("F33", "F34")
@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, FILE - 1, FILE + 1])
def test_a_file_of_the_wrong_length_is_removed(make: Make, tmp_path: Path, length: int) -> None:
    store = make()
    assert put(store, 1)
    (path,) = files(tmp_path)
    path.write_bytes((path.read_bytes() + b"x")[:length])
    assert not get(store, 1)
    assert files(tmp_path) == []


@pytest.mark.fault("F34")
def test_a_block_under_another_blocks_name_is_refused(make: Make, tmp_path: Path) -> None:
    store = make()
    put(store, 1)
    put(store, 2)
    one, two = files(tmp_path)
    two.write_bytes(one.read_bytes())
    assert not get(store, 2)
    assert get(store, 1)


WRITER = """
import sys, time
from pathlib import Path
from pdmesh import failpoints
from pdmesh.kv.tiers.file_format import checksum_of, identity_of
from pdmesh.kv.tiers.file_store import FileStore
from tests.unit.kv.tiers.test_file_store import (
    BLOCK,
    OWNER,
    data_of,
    name_of,
)
store = FileStore(Path(sys.argv[1]), identity_of("model", 0, 2), BLOCK, 10**9, time.time)
failpoints.arm(sys.argv[2])
for key in range(1, 100):
    data = data_of(key)
    assert store.put(name_of(key), OWNER, data, checksum_of(data))
    print(key, flush=True)
"""


@pytest.mark.req("S105")
@pytest.mark.fault("F33")
@pytest.mark.parametrize("point", ["tier.file.header", "tier.file.half", "tier.file.written"])
def test_a_writer_killed_at_any_point_leaves_whole_blocks_or_none(
    make: Make, tmp_path: Path, clock: Clock, point: str
) -> None:
    """After the kill, every acknowledged block is there. The block that was being written is
    absent.
    """
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path), f"{point}=sigkill@4"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    acknowledged = {int(line) for line in done.stdout.split()}
    assert acknowledged == {1, 2, 3}
    store = make()
    assert keys(store) == acknowledged
    assert all(get(store, key) for key in acknowledged)
    assert not get(store, 4)
    assert len(files(tmp_path)) == 4, "the torn file still has its temporary name"
    clock.now = max(p.stat().st_mtime for p in files(tmp_path)) + 301
    assert store.recover() == 3 * FILE
    assert len(files(tmp_path)) == 3
    assert put(store, 4)


@pytest.mark.req("S78", "S96", "S105")
def test_the_quota_is_kept_by_evicting_the_least_recently_used_blocks(
    make: Make, clock: Clock
) -> None:
    store = make(quota=10 * FILE)
    for key in range(10):
        clock.now += 1
        assert put(store, key)
    clock.now += 1
    assert get(store, 0), "a use"
    clock.now += 1
    assert put(store, 10)
    assert store.bytes_used <= 10 * FILE
    assert {0, 10} <= keys(store)
    assert 1 not in keys(store), "the least recently used"
    assert store.num_evicted == 10 - (len(keys(store)) - 1)


@pytest.mark.req("S96")
def test_kept_blocks_stay_whichever_instance_evicts(make: Make, clock: Clock) -> None:
    store = make(quota=4 * FILE)
    for key in range(4):
        clock.now += 1
        put(store, key)
    assert store.keep(name_of(0), OWNER, clock.now + 3600)
    assert not store.keep(name_of(77), OWNER, clock.now + 3600)
    other = make(quota=4 * FILE)
    clock.now += 1
    assert put(other, 5)
    assert 0 in keys(other)
    assert get(store, 0)
    assert 0 in keys(store)


@pytest.mark.req("S96")
@pytest.mark.parametrize("writes_ahead", [False, True])
def test_kept_blocks_never_fill_the_store(make: Make, clock: Clock, writes_ahead: bool) -> None:
    """Too many files may be kept by pins of several models, by pins that were removed while no
    instance ran, or by a clock that was a year ahead.
    """
    store = make(quota=8 * FILE)
    true_time = clock.now
    clock.now += 365 * 86_400 if writes_ahead else 0
    for key in range(8):
        assert put(store, key)
        assert writes_ahead or store.keep(name_of(key), OWNER, clock.now + 3600 + key)
    clock.now = true_time + 1
    for key in range(10, 14):
        clock.now += 1
        assert put(store, key)
        assert key in keys(store)
    assert len(keys(store) & set(range(8))) == 6, "three quarters stay kept"


@pytest.mark.req("S96")
def test_an_owner_beyond_its_share_is_evicted_first(make: Make, clock: Clock) -> None:
    store = make(quota=10 * FILE, owner_share=0.5)
    for key in range(3):
        clock.now += 1
        put(store, key, OTHER)
    for key in range(10, 17):
        clock.now += 1
        put(store, key)
    clock.now += 1
    assert put(store, 50)
    kept = {f.owner for f in store.scan() if int.from_bytes(f.name, "big") < 3}
    assert kept == {OTHER.hex()}
    assert sum(f.owner == OTHER.hex() for f in store.scan()) == 3, "older, and within its share"


@pytest.mark.req("S105")
def test_files_of_other_models_count_and_are_evicted_too(make: Make, clock: Clock) -> None:
    """After an upgrade, the blocks of the old model are useless, but they take space on the
    disk.
    """
    old, new = make(model="old", quota=4 * FILE), make(quota=4 * FILE)
    for key in range(4):
        put(old, key)
        clock.now += 1
    assert put(new, 10)
    assert put(new, 11)
    assert len(keys(old)) + len(keys(new)) <= 4
    assert {10, 11} <= keys(new)


def test_among_blocks_written_together_the_tail_counts_as_older(make: Make) -> None:
    store = make()
    for position in range(5):
        put(store, position, position=position)
    by_age = sorted(store.scan(), key=lambda f: f.used_at)
    assert [int.from_bytes(f.name, "big") for f in by_age] == [4, 3, 2, 1, 0]


@pytest.mark.fault("F33")
def test_a_full_disk_raises_and_leaves_nothing_behind(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, write = make(), os.write
    room = 500

    def write_until_full(fd: int, data: bytes) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(fd, bytes(data)[:room])
        room -= count
        return count

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write_until_full)
        with pytest.raises(OSError, match="No space"):
            put(store, 1)
    assert files(tmp_path) == []
    assert put(store, 1)
    assert get(store, 1)


@dataclass
class SmallDisk:
    """A disk on which a directory may have only this many bytes, whatever the quota."""

    folder: Path
    num_bytes: int
    write: Callable[[int, bytes], int] = os.write

    def __call__(self, fd: int, data: bytes) -> int:
        used = sum(p.stat().st_size for p in self.folder.rglob("*") if p.is_file())
        if used + len(data) > self.num_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.write(fd, data)


@pytest.mark.fault("F33")
def test_a_disk_smaller_than_the_quota_works_by_evicting_blocks(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    store = make(quota=100 * FILE)
    monkeypatch.setattr(os, "write", SmallDisk(tmp_path, 10 * FILE + FILE // 2))
    for key in range(40):
        clock.now += 1
        assert put(store, key), key
    assert store.num_evicted >= 30
    assert all(get(store, key) for key in (38, 39))


@pytest.mark.fault("F33")
def test_a_full_disk_without_a_count_of_bytes_gets_room_by_evicting(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are from an earlier release, which kept no count."""
    before = make(quota=100 * FILE)
    for key in range(40):
        put(before, key)
    (tmp_path / ".count").unlink()
    disk, pwrite = SmallDisk(tmp_path, 40 * FILE), os.pwrite

    def write_within(fd: int, data: bytes, offset: int) -> int:
        used = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
        if os.fstat(fd).st_size < offset + len(data) and used + len(data) > disk.num_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "write", disk)
    monkeypatch.setattr(os, "pwrite", write_within)
    store = make(quota=100 * FILE)
    for key in range(40, 50):
        assert put(store, key), key
    assert 10 < store.num_evicted <= 20, "no more blocks than necessary"


@pytest.mark.fault("F33")
def test_the_store_is_not_emptied_if_other_programs_take_the_freed_space(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make()
    for key in range(20):
        put(store, key)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", SmallDisk(tmp_path, 0))
        for key in range(20, 30):
            with pytest.raises(OSError, match="No space"):
                put(store, key)
    assert len(files(tmp_path)) == 18, "a tenth was evicted, once"
    assert store.recover() == store.bytes_used == 18 * FILE
    assert put(store, 40)


@pytest.mark.fault("F33")
def test_several_writers_keep_one_quota_together(tmp_path: Path) -> None:
    """Each writer once filled the quota by itself, so that four writers reached 3.9 times the
    quota.
    """
    child = (
        "import sys, time; from pathlib import Path; import numpy as np\n"
        "from pdmesh.kv.tiers.file_format import checksum_of, identity_of\n"
        "from pdmesh.kv.tiers.file_store import FileStore\n"
        f"block, quota = {BLOCK}, {30 * FILE}\n"
        "store = FileStore(Path(sys.argv[1]), identity_of('m', 0, 1), block, quota, time.time)\n"
        "for n in range(60):\n"
        "    data = np.full(block, n, np.uint8)\n"
        "    name = bytes([int(sys.argv[2])]) * 15 + bytes([n])\n"
        "    store.put(name, bytes(8), data, checksum_of(data))\n"
        # A listing of a directory takes a while. A file that is in two listings existed between
        # them.
        "    files = set(Path(sys.argv[1]).rglob('*.kv')) & set(Path(sys.argv[1]).rglob('*.kv'))\n"
        "    assert len(files) <= 30 + 4, len(files)\n"  # each writer may be writing one more block
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", child, str(tmp_path), str(n)]) for n in range(4)
    ]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    assert 20 <= len(files(tmp_path)) <= 34


def test_files_are_for_this_user_alone(make: Make, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        put(make(), 1)
    finally:
        os.umask(old)
    found = list(tmp_path.rglob("*"))
    assert {p.stat().st_mode & 0o777 for p in found if p.is_file()} == {0o600}
    assert {p.stat().st_mode & 0o777 for p in found if p.is_dir()} == {0o700}


def test_a_lost_or_wrong_count_is_computed_again(make: Make, tmp_path: Path) -> None:
    store = make(quota=10 * FILE)
    for key in range(5):
        put(store, key)
    (tmp_path / ".count").write_bytes(b"")
    again = make(quota=10 * FILE)
    assert put(again, 5)
    assert again.bytes_used == 6 * FILE
    for path in files(tmp_path):
        path.unlink()  # another program removes the files, so the count is wrong
    for key in range(10, 20):
        assert put(again, key)
    assert again.bytes_used == 10 * FILE


def test_a_stored_file_knows_its_owner_and_name(make: Make) -> None:
    store = make()
    put(store, 7, OTHER)
    (found,) = store.scan()
    assert isinstance(found, StoredFile)
    assert (found.owner, found.name, found.num_bytes) == (OTHER.hex(), name_of(7), FILE)


def test_hosts_with_the_same_process_ids_write_under_different_names(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts share the directory. In containers, every writer may have process id 1."""
    names: list[str] = []
    rename = Path.rename

    def seen(path: Path, target: Path) -> Path:
        names.append(path.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", seen)
    for key in (1, 257):
        assert make().put(name_of(key), OWNER, data_of(key), checksum_of(data_of(key)))
    assert names[0] != names[1]
