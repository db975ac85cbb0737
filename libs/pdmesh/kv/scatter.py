"""Between discrete blocks and the contiguous buffer: gather at the sender, RecvScatter at the receiver (S50).

Copies run on 8-byte words where the block size allows: that is numpy's fast path for index arrays. Torch tensors
come in as `t.view(torch.uint8).numpy()`, which copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdmesh.kv.transport import ByteArray

ByteMatrix = npt.NDArray[np.uint8]  # (blocks, bytes of one block of one layer), rows contiguous
BlockIds = Sequence[int] | npt.NDArray[np.integer[Any]]


def gather(caches: Sequence[ByteMatrix], block_ids: BlockIds, out: ByteArray) -> None:
    """Copy the named blocks of each layer into `out`, layer-major. Raises ValueError unless sizes match."""
    ids = _ids(caches, block_ids, out)
    start = 0
    for cache in caches:
        source, width = _words(cache)
        length = len(ids) * cache.shape[1]
        target = out[start : start + length].view(source.dtype).reshape(len(ids), width)
        np.take(
            source, ids, axis=0, out=target, mode="clip"
        )  # ids are checked; "raise" would buffer
        start += length


def recv_scatter(src: ByteArray, caches: Sequence[ByteMatrix], block_ids: BlockIds) -> None:
    """Copy `src` back to the named blocks of each layer. Raises ValueError unless sizes match."""
    ids = _ids(caches, block_ids, src)
    start = 0
    for cache in caches:
        target, width = _words(cache)
        length = len(ids) * cache.shape[1]
        target[ids] = src[start : start + length].view(target.dtype).reshape(len(ids), width)
        start += length


def _ids(
    caches: Sequence[ByteMatrix], block_ids: BlockIds, buffer: ByteArray
) -> npt.NDArray[np.intp]:
    ids = np.asarray(block_ids, dtype=np.intp)
    expected = len(ids) * sum(cache.shape[1] for cache in caches)
    if buffer.size != expected:
        raise ValueError(f"{len(ids)} blocks need {expected} bytes, the buffer has {buffer.size}")
    if not buffer.flags.c_contiguous:
        raise ValueError("the buffer must be contiguous")
    smallest = min((cache.shape[0] for cache in caches), default=0)
    if len(ids) and (ids.min() < 0 or ids.max() >= smallest):
        raise ValueError(f"block ids outside 0..{smallest - 1}")
    return ids


def _words(cache: ByteMatrix) -> tuple[npt.NDArray[Any], int]:
    """The same bytes as rows of the widest words that divide a block."""
    if not cache.flags.c_contiguous:
        raise ValueError("a layer's blocks must be contiguous")
    size = cache.shape[1]
    word = np.int64 if size % 8 == 0 else np.uint8
    if word is np.int64 and cache.ctypes.data % 8:
        word = np.uint8
    return cache.view(word), size // np.dtype(word).itemsize
