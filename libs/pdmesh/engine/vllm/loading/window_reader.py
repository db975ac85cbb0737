"""Reads weight files in a thread, one window after the other, into the caller's memory.

A window is a run of tensors in one file. Reads are sequential within a file, in pieces, and each
byte is read once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Protocol

from pdmesh.core.loading.weight_header import (
    LENGTH_BYTES,
    WeightHeader,
    WeightsUnreadable,
    header_bytes,
    parse,
)
from pdmesh.core.loading.window_plan import WeightWindow

PIECE_BYTES: Final = 8 << 20  # the most bytes of one read


class WeightFile(Protocol):
    """An open file. A read begins at the offset, and may return fewer bytes than asked.

    A result of 0 means the end of the file.
    """

    @property
    def num_bytes(self) -> int: ...
    def read_into(self, memory: memoryview, offset: int) -> int: ...


OpenFile = Callable[[Path], AbstractContextManager[WeightFile]]


class DiskFile:
    def __init__(self, fd: int) -> None:
        self._fd, self.num_bytes = fd, os.fstat(fd).st_size

    def read_into(self, memory: memoryview, offset: int) -> int:
        return os.preadv(self._fd, [memory], offset)


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[DiskFile]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield DiskFile(fd)
    finally:
        os.close(fd)


def read_header(path: Path, open_file: OpenFile = open_file) -> WeightHeader:
    """Raises WeightsUnreadable."""
    with _named(path.name), open_file(path) as file:
        first = bytearray(LENGTH_BYTES)
        num_first = _fill(file, memoryview(first), 0)
        text = bytearray(header_bytes(path.name, bytes(first[:num_first]), file.num_bytes))
        if _fill(file, memoryview(text), LENGTH_BYTES) < len(text):
            raise WeightsUnreadable(path.name, "ends within its header")
        return parse(path.name, bytes(text), file.num_bytes)


def read_window(file: WeightFile, window: WeightWindow, memory: memoryview) -> None:
    """Fill `memory` with the window's bytes. Raises WeightsUnreadable and OSError."""
    if _fill(file, memory, window.begin) < len(memory):
        raise WeightsUnreadable(window.file, "ends before its last tensor: it changed meanwhile")


class WindowReader:
    """At most one window is being read at a time. `close` does not wait for the read."""

    def __init__(self, folder: Path, open_file: OpenFile = open_file) -> None:
        self._folder, self._open_file = folder, open_file
        self._asked: queue.Queue[tuple[WeightWindow, memoryview] | None] = queue.Queue(maxsize=2)
        self._done: queue.Queue[WeightsUnreadable | None] = queue.Queue(maxsize=2)
        self._thread = threading.Thread(target=self._run, name="pdmesh-weights", daemon=True)
        self._thread.start()

    def start(self, window: WeightWindow, memory: memoryview) -> None:
        self._asked.put((window, memory))

    def wait(self, window: WeightWindow, timeout_s: float) -> WeightsUnreadable | None:
        """Wait for the window that was started. Returns its fault, or None."""
        try:
            return self._done.get(timeout=timeout_s)
        except queue.Empty:
            return WeightsUnreadable(window.file, f"a read did not end within {timeout_s:g} s")

    def close(self) -> None:
        self._asked.put(None)

    def _run(self) -> None:
        with contextlib.ExitStack() as opened:
            name, file = "", None
            while (asked := self._asked.get()) is not None:
                window, memory = asked
                try:
                    with _named(window.file):
                        if file is None or window.file != name:
                            opened.close()
                            file = opened.enter_context(self._open_file(self._folder / window.file))
                            name = window.file
                        read_window(file, window, memory)
                    self._done.put(None)
                except WeightsUnreadable as fault:
                    self._done.put(fault)
                except (MemoryError, ValueError) as error:
                    self._done.put(WeightsUnreadable(window.file, f"cannot be read: {error!r}"))


@contextlib.contextmanager
def _named(file: str) -> Iterator[None]:
    """Turn an error of the disk into WeightsUnreadable, with the name of the file."""
    try:
        yield
    except OSError as error:
        raise WeightsUnreadable(file, f"cannot be read: {error.strerror or error}") from error


def _fill(file: WeightFile, memory: memoryview, offset: int) -> int:
    """Read until `memory` is full or the file ends. Returns how many bytes were read."""
    at = 0
    while at < len(memory):
        num_bytes = file.read_into(memory[at : at + PIECE_BYTES], offset + at)
        if num_bytes == 0:
            break
        at += num_bytes
    return at
