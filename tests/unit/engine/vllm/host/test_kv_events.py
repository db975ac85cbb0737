"""vLLM's cache events are translated to the mesh's block names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from pdmesh.core.kv.prefix.block_hash import block_hashes
from pdmesh.engine.base import BlocksChanged
from pdmesh.engine.vllm.config import VllmConfig, events_endpoint
from pdmesh.engine.vllm.engine import VllmEngine
from pdmesh.engine.vllm.host.kv_events import (
    AllBlocksCleared,
    BlockNames,
    BlockRemoved,
    BlockStored,
    decode_batch,
    images_in,
)
from pdmesh.errors import EngineFailed

ROOT = bytes(range(16))
TOKENS = list(range(12))
NAMES = block_hashes(ROOT, TOKENS, 4)


def stored(first: int, last: int, salt: str | None = ROOT.hex()) -> BlockStored:
    """The event that blocks `first` to `last` (exclusive) of TOKENS were stored. vLLM's hash of
    block i is b"v<i>".
    """
    return BlockStored(
        [b"v%d" % i for i in range(first, last)],
        b"v%d" % (first - 1) if first else None,
        TOKENS[4 * first : 4 * last],
        4,
        [[salt] if salt and i == 0 else None for i in range(first, last)],
    )


def names(capacity: int = 100) -> BlockNames:
    return BlockNames(capacity, 4)


@pytest.mark.req("S80")
def test_a_chain_continues_over_events() -> None:
    view = names()
    assert view.handle(0, [stored(0, 2)]) == BlocksChanged(tuple(NAMES[:2]))
    assert view.handle(1, [stored(2, 3)]) == BlocksChanged((NAMES[2],))


def test_a_block_reported_twice_changes_nothing() -> None:
    view = names()
    view.handle(0, [stored(0, 2)])
    assert view.handle(1, [stored(0, 2)]) is None


def test_only_the_events_of_one_cache_group_count() -> None:
    """vLLM reports a block for each cache group. A group with a window drops the block first."""
    view = names()
    view.group = 1
    mine, others = stored(0, 2), stored(0, 4)
    mine.group_idx, others.group_idx = 1, 0
    assert view.handle(0, [others]) is None
    assert view.handle(1, [mine]) == BlocksChanged(tuple(NAMES[:2]), ())
    assert view.handle(2, [BlockRemoved([b"v0"], 0)]) is None
    assert view.handle(3, [BlockRemoved([b"v0"], 1)]) == BlocksChanged((), (NAMES[0],))


def test_removed_blocks_are_named_and_can_still_be_parents() -> None:
    view = names()
    view.handle(0, [stored(0, 2)])
    assert view.handle(1, [BlockRemoved([b"v1"])]) == BlocksChanged((), (NAMES[1],))
    assert view.handle(2, [stored(2, 3)]) == BlocksChanged((NAMES[2],))


def test_a_block_that_was_stored_and_removed_in_one_batch_is_not_reported() -> None:
    assert names().handle(0, [stored(0, 1), BlockRemoved([b"v0"])]) is None


def test_clearing_starts_the_view_again() -> None:
    view = names()
    view.handle(0, [stored(0, 2)])
    assert view.handle(1, [AllBlocksCleared(), stored(0, 1)]) == BlocksChanged(
        (NAMES[0],), (), is_cleared=True
    )


def test_after_a_gap_only_later_events_count() -> None:
    """The lost batch may have removed block 0, and no later event would report that again.

    The block is still known as a parent.
    """
    view = names()
    view.handle(0, [stored(0, 1)])
    assert view.handle(2, [stored(1, 2)]) == BlocksChanged((NAMES[1],), (), is_cleared=True)
    assert view.num_held(NAMES) == 0
    assert view.handle(3, [stored(0, 1)]) == BlocksChanged((NAMES[0],))
    assert view.num_held(NAMES) == 2


def test_blocks_without_a_salt_have_no_name() -> None:
    view = names()
    assert view.handle(0, [stored(0, 1, salt=None), stored(1, 2)]) is None
    assert view.handle(1, [BlockRemoved([b"v0"])]) is None


def test_blocks_of_which_only_some_are_told_get_no_names() -> None:
    """In layers with a window, vLLM stores only the last blocks, but the event has the tokens of
    all blocks.
    """
    view = names()
    view.handle(0, [stored(0, 1)])
    last = BlockStored([b"v2"], b"v0", TOKENS[4:], 4, [None])
    assert view.handle(1, [last]) is None
    assert view.num_held(NAMES) == 1


def test_the_memory_of_names_is_bounded_and_forgotten_names_are_reported() -> None:
    view = names(capacity=2)
    view.handle(0, [stored(0, 2)])
    assert view.handle(1, [stored(2, 3)]) == BlocksChanged((NAMES[2],), (NAMES[0],))


def test_a_batch_is_read_as_vllm_packs_it() -> None:
    """The batch is an array, and its events are tagged maps. Unknown fields are skipped."""
    event = {
        "type": "BlockStored",
        "block_hashes": [b"v0"],
        "parent_block_hash": None,
        "token_ids": TOKENS[:4],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [[ROOT.hex()]],
        "group_idx": 0,
    }
    payload = msgspec.msgpack.encode([1.5, [event, {"type": "AllBlocksCleared"}], 0])
    first = stored(0, 1)
    first.group_idx = 0
    assert decode_batch(payload) == [first, AllBlocksCleared()]


async def test_events_that_cannot_be_read_end_the_engine(tmp_path: Path) -> None:
    """If such events were skipped, the mesh's index would be wrong until the engine ends."""
    engine = VllmEngine(VllmConfig("p0", 1, tmp_path, "m"))
    engine._private_dir = tmp_path
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.PUB)
    publisher.bind(events_endpoint(tmp_path))
    engine._events = engine._watched(engine._follow_events(), "vllm-kv-events")
    try:
        while not engine._events.done():
            await publisher.send_multipart([b"", bytes(8), b"no batch"])
            await asyncio.sleep(0.01)
        with pytest.raises(EngineFailed, match="vllm-kv-events failed"):
            await anext(engine.outputs())
    finally:
        publisher.close(linger=0)
        context.term()


@pytest.mark.req("S80", "S128")
def test_images_are_part_of_the_names_as_gateways_make_them() -> None:
    """Two images begin in the first block. One of them continues in the next blocks, which are in
    another event.
    """
    one, two = bytes(32), b"x" * 32
    expected = block_hashes(ROOT, TOKENS, 4, images=[(1, one), (2, two)])
    first, later = stored(0, 1), stored(1, 3)
    first.extra_keys = [[[one.hex(), 1], [f"adapter:owner:{two.hex()}", 2], ROOT.hex()]]
    later.extra_keys = [[[two.hex(), -2]], None]
    view = names()
    assert view.handle(0, [first]) == BlocksChanged((expected[0],))
    assert view.handle(1, [later]) == BlocksChanged(tuple(expected[1:]))
    assert not set(expected) & set(NAMES)


def test_images_of_an_event_are_placed_among_its_tokens() -> None:
    keys = [None, [["aa", -3], ["bb", 3]], ["lora", ["cc", 0], "salt"]]
    assert images_in(keys, 4) == [(7, b"\xbb"), (8, b"\xcc")]
