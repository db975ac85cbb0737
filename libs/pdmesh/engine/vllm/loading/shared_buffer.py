"""Memory that all ranks of a node share. One rank writes weights to it, and all ranks read them.

The memory has no name in the file system, so nothing is left when the processes end. The small
/dev/shm of a container does not limit the memory.
"""

from __future__ import annotations

import mmap
import os
import struct

from pdmesh.engine.vllm.loading.node_ranks import NodeRanks
from pdmesh.errors import EngineFailed

_PLACE = struct.Struct("<qqq")  # the reader's pid, its file descriptor, bytes


def allocate(num_bytes: int, ranks: NodeRanks) -> mmap.mmap:
    """Returns the same memory in each rank. All ranks must call this.

    If a rank cannot open the memory, all ranks raise EngineFailed.

    The memory is freed when no rank refers to it any more.
    """
    size = max(1, num_bytes)
    if ranks.size == 1:
        return _mapped(-1, size)
    own = _create(size) if ranks.is_reader else -1
    try:
        place = ranks.from_reader(_PLACE.pack(os.getpid(), own, size))
        found = _open(*_PLACE.unpack(place)[:2]) if not ranks.is_reader else own
        (is_missing,) = ranks.highest([found < 0])
        if is_missing:
            raise EngineFailed(f"no shared memory for {size} bytes of weights")
        try:
            return _mapped(found, size)
        finally:
            if not ranks.is_reader:
                os.close(found)
    finally:
        if own >= 0:
            os.close(own)


def _create(size: int) -> int:
    """A descriptor of new memory, or -1 if it cannot be created."""
    try:
        made = os.memfd_create("pdmesh-weights")
        os.ftruncate(made, size)
    except OSError:
        return -1
    return made


def _open(pid: int, fd: int) -> int:
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC) if fd >= 0 else -1
    except OSError:
        return -1


def _mapped(fd: int, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size)
    except OSError as error:
        raise EngineFailed(f"no memory for {size} bytes of weights: {error.strerror}") from error
