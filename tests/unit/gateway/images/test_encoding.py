"""A prefill that waits for image embeddings gets exactly one message, whatever happens to the
encoder.
"""

from __future__ import annotations

from typing import Any, cast

import pytest

from pdmesh.core.request.events import (
    Event,
    LegAccepted,
    LegFailed,
    LegFinished,
    LegLost,
    LegRejected,
)
from pdmesh.errors import EngineFailed
from pdmesh.services.gateway.images.encoding import EncodeLeg, Encoder
from pdmesh.services.gateway.routing.sessions import InstanceSession
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.instance_service_pb2 import Command, Encode

KEY, PREFILL_KEY = 7, 3
RECORD = InstanceRecord(instance_id="encoder-0", incarnation=5, kv_addresses=["address"])


class Session:
    def __init__(self, is_open: bool = True) -> None:
        self.is_open = is_open
        self.sent: list[Command] = []
        self.legs: set[int] = set()

    def open_leg(self, key: int, owner: object, command: Command) -> bool:
        if self.is_open:
            self.legs.add(key)
            self.sent.append(command)
        return self.is_open

    def send(self, command: Command) -> None:
        self.sent.append(command)

    def forget(self, key: int) -> None:
        self.legs.discard(key)


def begun(*, is_open: bool = True) -> tuple[EncodeLeg, Session, Session]:
    theirs, prefill = Session(is_open), Session()
    encoder = Encoder(RECORD, cast("InstanceSession", theirs))
    leg = EncodeLeg(encoder, KEY, PREFILL_KEY, cast("InstanceSession", prefill))
    leg.begin(Command(encode=Encode(key=KEY)))
    return leg, theirs, prefill


def told(session: Session) -> list[Any]:
    return [command.embedded for command in session.sent]


def test_the_prefill_is_told_where_the_embeddings_are() -> None:
    leg, theirs, prefill = begun()
    leg.on_event(LegAccepted(KEY))
    assert told(prefill) == []
    leg.on_event(LegFinished(KEY, "stop"))
    (embedded,) = told(prefill)
    assert (embedded.key, embedded.encoder.instance_id) == (PREFILL_KEY, "encoder-0")
    assert (embedded.encoder.incarnation, list(embedded.kv_addresses)) == (5, ["address"])
    assert not theirs.legs


@pytest.mark.fault("F1")
@pytest.mark.parametrize(
    "event",
    [LegRejected(KEY), LegFailed(KEY, EngineFailed("no"), is_retryable=True), LegLost(KEY)],
    ids=["refused", "failed", "lost"],
)
def test_without_embeddings_the_prefill_is_told_so(event: Event) -> None:
    leg, _, prefill = begun()
    leg.on_event(event)
    leg.on_event(LegLost(KEY))
    leg.end()
    (embedded,) = told(prefill)
    assert embedded.key == PREFILL_KEY
    assert not embedded.HasField("encoder")


def test_an_encoder_that_cannot_be_reached_is_not_awaited() -> None:
    _, _, prefill = begun(is_open=False)
    assert len(told(prefill)) == 1


def test_a_prompt_that_is_over_aborts_its_encoding() -> None:
    leg, theirs, prefill = begun()
    leg.end()
    leg.on_event(LegFinished(KEY, "stop"))
    assert theirs.sent[-1].abort.key == KEY
    assert not theirs.legs
    assert told(prefill) == []
