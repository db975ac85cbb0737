"""A prefill waits for image embeddings from an encoder, and goes on without those that do not
come.
"""

from __future__ import annotations

import pytest

from pdmesh.core.images.avoided_encoders import LIMIT
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.engine.awaited_embeddings import AwaitedEmbeddings
from pdmesh.engine.base import KvPeer
from pdmesh.errors import KvTransferFailed

ENCODER = KvPeer("encoder-0", 1, ("address",))


async def fetch_one(encoder: KvPeer, deadline_s: float) -> int:
    assert encoder == ENCODER
    assert deadline_s > 0
    return 1


def counted(awaited: AwaitedEmbeddings) -> dict[str, float]:
    found = awaited.numbers().items()
    return {name.removeprefix("num_embeddings_"): num for name, num in found if num}


async def test_what_was_fetched_and_what_was_lost_is_counted() -> None:
    awaited = AwaitedEmbeddings()
    awaited.expect(1)
    awaited.tell(1, ENCODER)
    assert await awaited.gather(1, 3, fetch_one) == 1
    assert counted(awaited) == {"fetched": 1, "lost": 2}
    assert len(awaited) == 0


async def test_an_encoder_that_made_none_is_not_asked() -> None:
    awaited = AwaitedEmbeddings()
    awaited.expect(1)
    awaited.tell(1, None)
    awaited.tell(1, ENCODER)  # a second message about the same leg changes nothing
    assert await awaited.gather(1, 2, fetch_one) == 0
    assert counted(awaited) == {"not_made": 2}


async def test_nobody_is_awaited_for_longer_than_the_patience() -> None:
    awaited = AwaitedEmbeddings(patience_s=0.0)
    awaited.expect(1)
    assert await awaited.gather(1, 2, fetch_one) == 0
    assert counted(awaited) == {"late": 2}
    assert awaited.num_gathered == 1, "its images are encoded now, which may take long"


async def test_a_leg_that_ended_awaits_nothing() -> None:
    awaited = AwaitedEmbeddings()
    awaited.expect(1)
    awaited.forget(1)
    awaited.tell(1, ENCODER)
    assert len(awaited) == 0
    assert counted(awaited) == {}


async def test_a_failure_of_the_fetch_leaves_no_wait() -> None:
    async def fail(encoder: KvPeer, deadline_s: float) -> int:
        raise RuntimeError

    awaited = AwaitedEmbeddings()
    awaited.expect(1)
    awaited.tell(1, ENCODER)
    with pytest.raises(RuntimeError):
        await awaited.gather(1, 1, fail)
    assert len(awaited) == 0


@pytest.mark.fault("F34")
async def test_an_encoder_that_cannot_be_fetched_from_is_soon_not_asked() -> None:
    """Otherwise each prompt would wait until its fetch fails at the deadline."""
    asked: list[KvPeer] = []

    async def fail(encoder: KvPeer, deadline_s: float) -> int:
        asked.append(encoder)
        raise KvTransferFailed("no byte came", reason=PullFailure.TIMEOUT)

    awaited = AwaitedEmbeddings()
    for leg in range(LIMIT + 3):
        awaited.expect(leg)
        awaited.tell(leg, ENCODER)
        assert await awaited.gather(leg, 2, fail) == 0
    assert asked == [ENCODER] * LIMIT
    assert counted(awaited) == {"lost": 2 * LIMIT, "skipped": 2 * 3}
    successor = KvPeer(ENCODER.instance_id, ENCODER.incarnation + 1, ENCODER.addresses)
    awaited.expect(99)
    awaited.tell(99, successor)
    assert await awaited.gather(99, 1, fail) == 0
    assert asked[LIMIT:] == [successor]


async def test_embeddings_that_were_evicted_are_no_failure_of_the_encoder() -> None:
    async def find_none(encoder: KvPeer, deadline_s: float) -> int:
        return 0

    awaited = AwaitedEmbeddings()
    for leg in range(2 * LIMIT):
        awaited.expect(leg)
        awaited.tell(leg, ENCODER)
        assert await awaited.gather(leg, 1, find_none) == 0
    assert counted(awaited) == {"lost": 2 * LIMIT}
