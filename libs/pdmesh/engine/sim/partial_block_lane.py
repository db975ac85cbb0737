"""The sim engine's blocks that are not full, or of which only a beginning is used (S103, S104)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pdmesh.core.kv.prefix.block_hash import tokens_to_bytes
from pdmesh.engine.base import DecodeJob, PrefillJob
from pdmesh.engine.sim.block_pool import BlockPool, Tail
from pdmesh.engine.sim.memory import PagedMemory


class PartialBlockLane:
    def __init__(self, memory: PagedMemory, pool: BlockPool) -> None:
        self._memory, self._pool = memory, pool
        self._size = memory.model.params.block_size

    def claim(self, job: PrefillJob, num_blocks: int) -> Tail | None:
        """What memory holds of the job's tokens after its first `num_blocks` blocks.

        The last token does not count: it is always computed.
        """
        if not (self._pool.sampling and _is_named(job, job.block_hashes, self._size)):
            return None
        begin, end = num_blocks * self._size, len(job.prompt) - 1
        data = tokens_to_bytes(job.prompt[begin : min(begin + self._size, end)])
        parent = job.block_hashes[num_blocks - 1] if num_blocks else b""
        tail = self._pool.claim_partial(bytes.fromhex(job.cache_salt), parent, data)
        if tail is not None and tail.source is not None:
            self._memory.copy(tail.source, tail.block, tail.num_tokens)
        return tail

    def keep(
        self,
        job: PrefillJob | DecodeJob,
        blocks: Sequence[int],
        tokens: array[int],
        hashes: Sequence[bytes],
    ) -> None:
        """`blocks` hold `tokens`, whose full blocks are named `hashes`.

        From now on a prompt may also continue within a block.
        """
        sampling, size = self._pool.sampling, self._size
        if not (sampling and _is_named(job, job.block_hashes, size)):
            return
        root = bytes.fromhex(job.cache_salt)
        num_full = len(tokens) // size
        first = 0 if sampling.start < size else num_full  # full blocks have only their own names
        for index in range(first, -(-len(tokens) // size)):
            data = tokens_to_bytes(tokens[index * size : (index + 1) * size])
            parent = hashes[index - 1] if index else b""
            self._pool.keep_partial(blocks[index], root, parent, data)


def _is_named(job: PrefillJob | DecodeJob, hashes: Sequence[bytes], size: int) -> bool:
    """Whether the job has a root and hashes of its own full blocks; if not, nothing is kept.

    The name of a beginning does not say which image it is of, so a prompt with images has none.
    """
    return bool(job.cache_salt) and not job.images and len(hashes) == len(job.prompt) // size
