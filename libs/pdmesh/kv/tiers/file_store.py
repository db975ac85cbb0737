"""KV blocks as files in a directory that instances share (S105).

In production the directory is on a shared file system. The path of a block's file is
`<root>/<identity>/<owner>/<two hex digits>/<name>.kv`. Identity stands for model and rank, and
owner for a tenant. A block is written under a temporary name and then renamed, so that a file is
complete even if its writer dies. Other damage is found by the checksums when a file is read, and
the file is removed. The modification time of a file is the time of its last use, or the time until
which the file is kept. `core.kv.tiers.file_eviction` chooses files for eviction by these times.

All processes that write to the directory share the quota. They count the bytes in use in one small
file, under a lock. A writer that dies may leave the count too high by one block. Therefore a
process counts the files again when the quota seems to be reached. Other programs may fill the disk
before the quota is reached. Then the store evicts files once and retries, and fails if the disk is
still full.

Methods block on I/O and may be called from any thread. They raise OSError if the disk is at fault.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdmesh import failpoints
from pdmesh.core.kv.tiers.file_eviction import (
    FullDisk,
    StoredFile,
    eviction_order,
    first_use,
    room_for,
    room_on_full_disk,
)
from pdmesh.kv.tiers.file_format import (
    HEADER_BYTES,
    BadBlockFile,
    BlockHeader,
    check_header,
    checksum_of,
    pack_header,
)
from pdmesh.kv.transport.base import ByteArray

_SUFFIX: Final = ".kv"
_TEMPORARY: Final = ".writing-"
_ABANDONED_S: Final = 300.0  # the writer of an older temporary file is taken to be dead
_COUNT: Final = struct.Struct("<qq")  # bytes added, bytes removed
_COUNT_FILE: Final = ".count"
_LOCK_FILE: Final = ".evicting"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FILE_MODE: Final = 0o600  # other users must not read KV, because it reveals the prompts
_FOLDER_MODE: Final = 0o700


@dataclass(slots=True)
class _Count:
    """The bytes added and removed by all writers.

    `added` only grows, so that processes that recount the files at the same time agree.
    """

    added: int
    removed: int

    @property
    def used(self) -> int:
        return max(0, self.added - self.removed)


class FileStore:
    """The store of one rank. `identity` is from `file_format.identity_of`; `clock` is wall time."""

    def __init__(
        self,
        root: Path,
        identity: bytes,
        block_bytes: int,
        quota_bytes: int,
        clock: Callable[[], float],
        *,
        owner_share: float = 1.0,
    ) -> None:
        self._root, self._identity, self._block_bytes = root, identity, block_bytes
        self._quota, self._clock, self._owner_share = quota_bytes, clock, owner_share
        self._folder = root / identity.hex()
        # A process id would not identify a writer: hosts that share the directory reuse the ids.
        self._writer = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._bytes_used: int | None = None  # as last counted; None if not counted yet
        self._full_disk = FullDisk()
        self.num_evicted = 0
        self.num_corrupt = 0
        # Long operations call this, on their thread, whenever they make progress.
        self.on_step: Callable[[], None] = _no_step

    @property
    def bytes_used(self) -> int:
        """The bytes of all blocks in the directory, as this process last counted them."""
        return self._bytes_used or 0

    @property
    def num_blocks_at_most(self) -> int:
        """The number of this store's blocks that fit into the quota."""
        return self._quota // (HEADER_BYTES + self._block_bytes)

    # -- blocks -----------------------------------------------------------------------------------

    def contains(
        self,
        names: Sequence[bytes],
        owner: bytes,
        is_given_up: threading.Event | None = None,
    ) -> int:
        """A mask of the positions whose blocks have files, up to the first block without a file.

        The look-up ends early once `is_given_up` is set. A file that is found may still be bad.
        """
        mask = 0
        for position, name in enumerate(names):
            if is_given_up is not None and is_given_up.is_set():
                break
            if not self._path(name, owner).exists():
                break
            mask |= 1 << position
            self.on_step()
        return mask

    def get(self, name: bytes, owner: bytes, out: ByteArray) -> bytes | None:
        """Read the block into `out`, verify it and return its checksum.

        Returns None if the block has no file. Raises BadBlockFile if the file is bad. The file is
        then removed and counted as corrupt, and the bytes in `out` are undefined.
        """
        path = self._path(name, owner)
        try:
            with path.open("rb", buffering=0) as file:
                header = check_header(
                    file.read(HEADER_BYTES), name, self._identity, self._block_bytes
                )
                self.on_step()
                if _read_into(file.fileno(), memoryview(out.data)) != self._block_bytes:
                    raise BadBlockFile("cut within the payload")
                if file.read(1):
                    raise BadBlockFile("longer than its header says")
            if checksum_of(out) != header.checksum:
                raise BadBlockFile("wrong checksum of the payload")
        except FileNotFoundError:
            return None  # the file was never written, or was just evicted
        except BadBlockFile:
            self.num_corrupt += 1
            with contextlib.suppress(OSError):  # a read-only disk refuses the removal
                self.delete(name, owner)
            raise
        self._touch(path)
        return header.checksum

    def put(
        self, name: bytes, owner: bytes, data: ByteArray, checksum: bytes, position: int = 0
    ) -> bool:
        """Store a block. Returns False if it exists already, or if eviction cannot make room.

        `position` is the block's place in its prompt. Later blocks of a prompt are evicted first.
        """
        path = self._path(name, owner)
        size = HEADER_BYTES + data.size
        header = BlockHeader(name, self._identity, data.size, checksum)
        for is_last in (False, True):
            if path.exists() or not self._reserve(size):
                return False
            try:
                self._write(path, header, data, first_use(self._clock(), position))
            except BaseException as error:
                self._count(-size)
                is_full = isinstance(error, OSError) and error.errno in _FULL
                if is_last or not is_full or not self._evict_of_what_is_there(size):
                    raise
            else:
                self._full_disk.written()
                return True
        raise AssertionError("unreachable")

    def _write(self, path: Path, header: BlockHeader, data: ByteArray, used_at: float) -> None:
        temporary = path.parent / f"{_TEMPORARY}{self._writer}-{next(self._numbers)}"
        _make_folder(path.parent)
        try:
            with _create(temporary) as file:
                _write_all(file, pack_header(header))
                failpoints.hit("tier.file.header")
                self.on_step()
                half = data.size // 2
                _write_all(file, data[:half].data)
                failpoints.hit("tier.file.half")
                self.on_step()
                _write_all(file, data[half:].data)
            os.utime(temporary, (used_at, used_at))
            failpoints.hit("tier.file.written")
            temporary.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def keep(self, name: bytes, owner: bytes, until: float) -> bool:
        """Prevent every instance from evicting the block before `until`.

        Returns False if the block has no file.
        """
        try:
            os.utime(self._path(name, owner), (until, until))
        except FileNotFoundError:
            return False
        return True

    def delete(self, name: bytes, owner: bytes) -> bool:
        return self._unlink(self._path(name, owner))

    # -- the directory ----------------------------------------------------------------------------

    def scan(self) -> Iterator[StoredFile]:
        """The files of all blocks of this identity, in no particular order."""
        yield from self._scan(self._folder)

    def recover(self) -> int:
        """Count all files again, and remove the temporary files of dead writers.

        Returns the bytes in use.
        """
        _make_folder(self._root)
        before = self._read_count()
        total = 0
        for path, num_bytes, used_at in self._files(self._root):
            if path.name.startswith(_TEMPORARY):
                if used_at < self._clock() - _ABANDONED_S:
                    self._unlink(path, is_counted=False)
                else:  # a block that is being written counts with its full size
                    total += max(num_bytes, HEADER_BYTES + self._block_bytes)
            elif path.suffix == _SUFFIX:
                total += num_bytes
        # Other writers may have added files during the scan. These files are counted twice if the
        # scan has seen them. Counting a file twice is better than not counting it.
        with self._counted() as count:
            count.removed = before.added - total
        if self._bytes_used is None:  # the disk has no room for the count
            self._bytes_used = total
        return self.bytes_used

    def _scan(self, folder: Path) -> Iterator[StoredFile]:
        for path, num_bytes, used_at in self._files(folder):
            if path.suffix == _SUFFIX:
                yield StoredFile(path, num_bytes, used_at)

    def _reserve(self, size: int) -> bool:
        """Count bytes that are about to be written. Returns False if there is no room for them.

        If the quota is reached, this evicts files to make room.
        """
        if self._bytes_used is None:
            self.recover()
        if self._add_within_quota(size):
            return True
        if size > self._quota:
            return False
        self._evict(lambda _: room_for(size, self._quota))
        return self._add_within_quota(size)

    def _add_within_quota(self, size: int) -> bool:
        with self._counted() as count:
            if count.used + size > self._quota:
                return False
            count.added += size
            return True

    def _evict_of_what_is_there(self, size: int) -> bool:
        """Evict files because the disk is full. Returns whether any file was evicted."""
        if not self._full_disk.may_evict():
            return False
        before = self.num_evicted
        with contextlib.suppress(OSError):
            self._evict(lambda used: room_on_full_disk(size, used))
        return self.num_evicted > before

    def _evict(self, target_of: Callable[[int], int]) -> None:
        """Evict files until at most `target_of(bytes in use)` bytes are left.

        Does nothing if another process is evicting. The lock is released even if a process dies.
        """
        lock = os.open(self._root / _LOCK_FILE, os.O_RDWR | os.O_CREAT, _FILE_MODE)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            target_bytes = target_of(self.recover())
            files = self._scan(self._root)
            for stored in eviction_order(files, self._clock(), self._quota, self._owner_share):
                if self._bytes_used is None:
                    self.recover()
                if self.bytes_used <= target_bytes:
                    return
                self.num_evicted += self._unlink(stored.path, stored.num_bytes)
        finally:
            os.close(lock)

    def _touch(self, path: Path) -> None:
        """Note the use of a file.

        Errors are ignored: on a disk that cannot be written, no file is evicted.
        """
        now = self._clock()
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < now:  # a kept file has a time in the future
                os.utime(path, (now, now))

    def _unlink(self, path: Path, num_bytes: int | None = None, is_counted: bool = True) -> bool:
        try:
            if num_bytes is None:
                num_bytes = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return False
        if is_counted:
            self._count(-num_bytes)
        return True

    def _count(self, num_bytes: int) -> None:
        """Add the bytes of a block to the count. `num_bytes` is negative for a removal."""
        with contextlib.suppress(OSError), self._counted() as count:
            if num_bytes < 0:
                count.removed -= num_bytes
            else:
                count.added += num_bytes

    def _read_count(self) -> _Count:
        with self._counted() as count:
            return _Count(count.added, count.removed)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[_Count]:
        """The count that all writers share. It is locked during the `with` block."""
        with self._lock:
            fd = os.open(self._root / _COUNT_FILE, os.O_RDWR | os.O_CREAT, _FILE_MODE)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                data = os.pread(fd, _COUNT.size, 0)
                is_lost = len(data) != _COUNT.size
                count = _Count(0, 0) if is_lost else _Count(*_COUNT.unpack(data))
                before = _Count(count.added, count.removed)
                yield count
                if is_lost or count != before:
                    self._write_count(fd, count)
                self._bytes_used = None if is_lost else count.used  # None leads to a recount
            finally:
                os.close(fd)

    @staticmethod
    def _write_count(fd: int, count: _Count) -> None:
        """Write the count.

        If the disk has no room for it, the count is lost until a block is evicted.
        """
        try:
            os.pwrite(fd, _COUNT.pack(count.added, count.removed), 0)
        except OSError as error:
            if error.errno not in _FULL:
                raise

    def _path(self, name: bytes, owner: bytes) -> Path:
        text = name.hex()
        return self._folder / owner.hex() / text[:2] / f"{text}{_SUFFIX}"

    def _files(self, folder: Path) -> Iterator[tuple[Path, int, float]]:
        """(path, bytes, modification time) of every file in the folder and in its subfolders.

        Files that vanish during the scan are skipped.
        """
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        for entry in entries:
            self.on_step()
            try:
                if entry.is_dir(follow_symlinks=False):
                    yield from self._files(Path(entry.path))
                else:
                    stat = entry.stat(follow_symlinks=False)
                    yield Path(entry.path), stat.st_size, stat.st_mtime
            except FileNotFoundError:
                continue


def _no_step() -> None:
    """The default of `on_step`."""


def _make_folder(folder: Path) -> None:
    """Make the folder and its missing parents, with access for this user only.

    `Path.mkdir(parents=True)` would give the parents the default mode.
    """
    if not folder.is_dir():
        if not folder.parent.is_dir():
            _make_folder(folder.parent)
        folder.mkdir(_FOLDER_MODE, exist_ok=True)


@contextlib.contextmanager
def _create(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_into(fd: int, out: memoryview) -> int:
    """Read until `out` is full or the file ends. Returns the number of bytes read."""
    done = 0
    while done < len(out) and (count := os.readv(fd, [out[done:]])):
        done += count
    return done
