"""Keeps the KV of drawn tokens for the next turn of a chat.

A draw updates the digest without touching memory. When a sequence ends, its full blocks are
written, named by continuing the prompt's chain of hashes, and made findable.
"""

from __future__ import annotations

from array import array

from pdmesh.core.kv.prefix.block_hash import block_hashes
from pdmesh.engine.base import DecodeJob, PrefillJob
from pdmesh.engine.sim.block_pool import BlockPool
from pdmesh.engine.sim.memory import PagedMemory
from pdmesh.engine.sim.model import shift_of, tokens_of


def keep_answer(
    memory: PagedMemory,
    pool: BlockPool,
    job: PrefillJob | DecodeJob,
    blocks: list[int],
    answer: list[int],
) -> tuple[bytes, ...]:
    """Store the full blocks that the answer completed, and add them to `blocks`.

    Returns the names of all full blocks that are now stored, including the prompt's, or nothing if
    no block was completed. The caller releases `blocks`.

    The last drawn token has no KV yet. A job without hashes of its full blocks keeps nothing.
    """
    size = memory.model.params.block_size
    num_hashed = len(job.prompt) // size
    tokens = job.prompt + array("I", answer[:-1])
    num_full = len(tokens) // size
    if num_full <= num_hashed or not job.cache_salt or len(job.block_hashes) != num_hashed:
        return ()
    num_kept = min(num_full, len(blocks) + pool.num_free)
    blocks += pool.allocate(max(0, num_kept - len(blocks)))
    tokens = tokens[: num_kept * size]
    states = memory.model.states(tokens_of(tokens, job.images), shift_of(job.adapter))
    memory.write(blocks, states, len(job.prompt))
    parent = job.block_hashes[-1] if job.block_hashes else b""
    rest = tokens[num_hashed * size :]
    begun = num_hashed * size
    images = [(i.position - begun, i.digest) for i in job.images if i.position >= begun]
    hashes = block_hashes(bytes.fromhex(job.cache_salt), rest, size, parent, images)
    for block, block_hash in zip(blocks[num_hashed:], hashes, strict=False):
        pool.store(block, block_hash)
    return (*job.block_hashes, *hashes) if hashes else ()
