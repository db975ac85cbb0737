"""Caches the KV of an answer in the simulated engine, for the chat's next prompt.

While a sequence draws, the KV of its answer is not written to memory. When the sequence ends, its
full blocks are written. Their hashes continue the prompt's chain of hashes, so that the next prompt
finds the blocks.
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

    Returns the names of all stored full blocks, including the prompt's, or an empty tuple if the
    answer completed no block. Nothing is stored for a job that lacks the hashes of its full blocks.
    The last drawn token has no KV yet, so it is left out. The caller releases `blocks`.
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
