"""SHA-256 of files, computed once and cached in a private folder.

A cached digest is used only if the file's device, inode, size, mtime and ctime are unchanged, the
times to the nanosecond. No program can set the ctime, so a file that was replaced or written in
place is hashed again. The digest of a file that changed a moment ago is not cached, since another
change might not show in the file's times. A cache file that cannot be trusted is not used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

import structlog

from pdmesh.errors import EngineFailed

log = structlog.get_logger(__name__)

SETTLED_S: Final = 2.0  # the coarsest resolution of times in any file system
PROGRESS_EVERY_S: Final = 5.0
_LOCK_S: Final = 300.0  # longest wait for another process that hashes the same folder
_MAX_THREADS: Final = 8
_CHUNK: Final = 4 << 20
_MAX_CACHE_BYTES: Final = 4 << 20
_MAX_FOLDERS: Final = 256
_VERSION: Final = 1
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identifies a file, and its state when it was hashed."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )

    def is_settled(self, now: float) -> bool:
        return max(self.mtime_ns, self.ctime_ns) / 1e9 < now - SETTLED_S


@dataclass(frozen=True, slots=True)
class FileDigest:
    stamp: Stamp
    sha256: str


def default_cache_dir() -> Path | None:
    """The cache's folder. None if the user has no home, or if XDG_CACHE_HOME is not absolute."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "pdmesh" / "digests" if base.is_absolute() else None


class FileDigests:
    """`of` blocks, so call it in a thread. The event loop's thread can end the call with `stop`."""

    def __init__(self, cache_dir: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._cache_dir, self._clock = cache_dir, clock
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        self._is_stopped.set()

    def of(self, folder: Path, names: Sequence[str]) -> dict[str, FileDigest]:
        """The digests of files in a folder.

        Raises OSError, and EngineFailed if a file changes during the call, or after `stop`.
        """
        with self._cache(folder) as cache:
            known = cache.read() if cache else {}
            found: dict[str, FileDigest] = {}
            for name in names:
                entry = known.get(name)
                if entry and entry.stamp == Stamp.of((folder / name).stat()):
                    found[name] = entry
            missing = [name for name in names if name not in found]
            if missing:
                found |= self._hashed(folder, missing)
                now = self._clock()
                kept = {n: d for n, d in known.items() if (folder / n).is_file()} | found
                if cache:
                    cache.write({n: d for n, d in kept.items() if d.stamp.is_settled(now)})
        return found

    def _hashed(self, folder: Path, names: Sequence[str]) -> dict[str, FileDigest]:
        total = sum((folder / name).stat().st_size for name in names)
        progress = _Progress(str(folder), total)
        num_threads = min(len(names), os.cpu_count() or 1, _MAX_THREADS)
        with ThreadPoolExecutor(num_threads, "pdmesh-sha256") as pool:
            digests = pool.map(lambda name: self._hash(folder / name, progress), names)
            return dict(zip(names, digests, strict=True))

    def _hash(self, path: Path, progress: _Progress) -> FileDigest:
        state, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
        with path.open("rb", buffering=0) as file:
            before = Stamp.of(os.fstat(file.fileno()))
            while count := file.readinto(buffer):
                self._check_wanted()
                state.update(buffer[:count])
                progress.add(count)
            if Stamp.of(os.fstat(file.fileno())) != before:
                raise changed(path)
        return FileDigest(before, state.hexdigest())

    def _check_wanted(self) -> None:
        if self._is_stopped.is_set():
            raise EngineFailed("the engine is no longer wanted", reason="ENGINE_START")

    @contextlib.contextmanager
    def _cache(self, folder: Path) -> Iterator[_Cache | None]:
        """Yields the folder's locked cache, so that other processes wait and find the result.

        Yields None if there is no cache, or no lock.
        """
        cache = _Cache.open(self._cache_dir, folder) if self._cache_dir is not None else None
        if cache is None:
            yield None
            return
        try:
            yield cache if self._has_lock(cache, folder) else None
        finally:
            cache.close()

    def _has_lock(self, cache: _Cache, folder: Path) -> bool:
        """Wait for the lock. Returns False if the file system has no locks, or after `_LOCK_S`.

        A process that holds the lock for longer may be frozen.
        """
        ends = time.monotonic() + _LOCK_S
        try:
            while not cache.try_lock():
                self._check_wanted()
                if time.monotonic() >= ends:
                    log.warning("digests.lock_held", folder=str(folder), waited_s=_LOCK_S)
                    return False
                self._is_stopped.wait(0.1)
        except OSError as error:
            log.warning("digests.no_cache", folder=str(folder), error=error.strerror)
            return False
        return True


def changed(path: Path) -> EngineFailed:
    text = f"{path} was changed while the model was loaded; load it again once it is whole"
    return EngineFailed(text, reason="MODEL_CHANGED")


class _Progress:
    def __init__(self, folder: str, total: int) -> None:
        self._folder, self._total, self._done = folder, total, 0
        self._said_at, self._lock = time.monotonic(), threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if time.monotonic() - self._said_at < PROGRESS_EVERY_S:
                return
            self._said_at = time.monotonic()
            done = self._done
        log.info("weights.hashing", folder=self._folder, done_bytes=done, total_bytes=self._total)


class _Cache:
    """The cached digests of one folder, in one file.

    `directory` and `lock` are file descriptors.
    """

    def __init__(self, directory: int, lock: int, name: str) -> None:
        self._directory, self._lock, self._name = directory, lock, name

    @classmethod
    def open(cls, cache_dir: Path, folder: Path) -> _Cache | None:
        """None if the cache's folder cannot be made, or if it is not private."""
        name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
        try:
            cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory = os.open(cache_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            log.warning("digests.no_cache", folder=str(cache_dir), error=error.strerror)
            return None
        try:
            _check_private(directory)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            lock = os.open(f"{name}.lock", flags, 0o600, dir_fd=directory)
        except OSError as error:
            os.close(directory)
            log.warning("digests.no_cache", folder=str(cache_dir), error=error.strerror)
            return None
        return cls(directory, lock, f"{name}.json")

    def try_lock(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._lock)
        os.close(self._directory)

    def read(self) -> dict[str, FileDigest]:
        """The entries that can be trusted."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(self._name, flags, dir_fd=self._directory), "rb") as file:
                _check_private(file.fileno())
                return _parsed(file.read(_MAX_CACHE_BYTES + 1))
        except (OSError, ValueError):
            return {}

    def write(self, digests: Mapping[str, FileDigest]) -> None:
        files = {name: [*astuple(d.stamp), d.sha256] for name, d in sorted(digests.items())}
        text = json.dumps({"version": _VERSION, "files": files})
        making = f"{self._name}.making"
        try:
            with contextlib.suppress(FileNotFoundError):  # remove what a killed process left behind
                os.unlink(making, dir_fd=self._directory)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(making, flags, 0o600, dir_fd=self._directory), "w") as file:
                file.write(text)
            os.replace(making, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            self._prune()
        except OSError as error:
            log.warning("digests.not_kept", error=error.strerror)

    def _prune(self) -> None:
        """Forget the folders that were hashed longest ago, and remove their lock files.

        This is harmless: at worst, two processes hash the same folder at the same time.
        """
        names = [e.name for e in os.scandir(self._directory) if e.name.endswith(".json")]
        if len(names) <= _MAX_FOLDERS:
            return

        def hashed_at(name: str) -> int:
            return os.stat(name, dir_fd=self._directory).st_mtime_ns

        for name in sorted(names, key=hashed_at)[:-_MAX_FOLDERS]:
            os.unlink(name, dir_fd=self._directory)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{name.removesuffix('.json')}.lock", dir_fd=self._directory)


def _check_private(descriptor: int) -> None:
    """Raises OSError unless this user owns the file or folder, and no other user has access."""
    status = os.fstat(descriptor)
    is_kind = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    if not is_kind or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(errno.EPERM, "not private")


def _parsed(data: bytes) -> dict[str, FileDigest]:
    """Raises ValueError for anything but what `write` writes."""
    if len(data) > _MAX_CACHE_BYTES:
        raise ValueError("too long")
    read = json.loads(data)
    if not isinstance(read, dict) or read.get("version") != _VERSION:
        raise ValueError("another version")
    files = read.get("files")
    if not isinstance(files, dict):
        raise ValueError("no files")
    return {name: _entry(entry) for name, entry in files.items()}


def _entry(entry: object) -> FileDigest:
    if not isinstance(entry, list) or len(entry) != 6:
        raise ValueError("not an entry")
    *numbers, sha256 = entry
    if not all(type(n) is int for n in numbers) or not isinstance(sha256, str):
        raise ValueError("not an entry")
    if not _SHA256.fullmatch(sha256):
        raise ValueError("not a digest")
    return FileDigest(Stamp(*numbers), sha256)
