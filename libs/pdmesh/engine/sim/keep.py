"""Keeping the KV of drawn tokens for the next turn of a chat.

A draw updates the digest without touching memory; only when a sequence ends are its full blocks written,
hashed on from the prompt's chain, and made findable.
"""

from __future__ import annotations

import numpy as np

from pdmesh.core.block_hash import block_hashes
from pdmesh.engine.base import PrefillJob
from pdmesh.engine.sim.block_pool import BlockPool
from pdmesh.engine.sim.memory import PagedMemory


def keep_answer(
    memory: PagedMemory,
    pool: BlockPool,
    job: PrefillJob,
    blocks: list[int],
    answer: list[int],
) -> tuple[bytes, ...]:
    """Store the full blocks that the answer completed, and add them to `blocks`, which the caller releases.

    Returns the names of all full blocks now stored, the prompt's included; none if nothing was kept.

    The last drawn token has no KV yet. Nothing is kept of a job without hashes of its own full blocks.
    """
    size = memory.model.params.block_size
    num_hashed = len(job.prompt) // size
    tokens = np.concatenate(
        [np.frombuffer(job.prompt, np.uint32), np.array(answer[:-1], np.uint32)]
    )
    num_full = len(tokens) // size
    if num_full == num_hashed or not job.cache_salt or len(job.block_hashes) != num_hashed:
        return ()
    blocks += pool.allocate(max(0, num_full - len(blocks)))
    memory.write(blocks, memory.model.states(tokens)[: num_full * size], num_hashed * size)
    parent = job.block_hashes[-1] if job.block_hashes else b""
    rest = tokens[num_hashed * size :].tolist()
    hashes = block_hashes(bytes.fromhex(job.cache_salt), rest, size, parent)
    for block, block_hash in zip(blocks[num_hashed:], hashes, strict=False):
        pool.store(block, block_hash)
    return (*job.block_hashes, *hashes)
