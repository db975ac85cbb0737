"""A session is the one stream from a gateway to an instance.

The commands of one turn of the event loop are sent in messages within gRPC's limit. A prompt that
the instance has not answered counts as a taken slot. Waiting prompts hear when the slot is free
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pdmesh.core.request.events import Event, LegRejected
from pdmesh.net.grpc.rpc import MAX_MESSAGE_BYTES
from pdmesh.services.gateway.routing.sessions import InstanceSession, messages
from pdmesh.v1.common_pb2 import InstanceRecord, TokenLogprob
from pdmesh.v1.instance_service_pb2 import (
    REJECT_REASON_BUSY,
    REJECT_REASON_TOO_LONG,
    Abort,
    Accepted,
    Command,
    Failed,
    FirstToken,
    Hello,
    Load,
    Prefill,
    Rejected,
    SessionEvent,
    SessionRequest,
    SessionResponse,
)

ACCEPTED = Accepted()
BUSY = Rejected(reason=REJECT_REASON_BUSY, retry_after_ms=20)
TOO_LONG = Rejected(reason=REJECT_REASON_TOO_LONG)


def prefill(key: int, num_bytes: int) -> Command:
    return Command(prefill=Prefill(key=key, prompt_token_ids=bytes(num_bytes)))


@pytest.mark.parametrize(
    ("num", "num_bytes", "num_messages"),
    [(0, 0, 0), (1, 100, 1), (5000, 100, 1), (256, 512 << 10, 18), (3, MAX_MESSAGE_BYTES // 2, 3)],
)
def test_commands_keep_their_order_and_no_message_is_too_large(
    num: int, num_bytes: int, num_messages: int
) -> None:
    """The case with 256 prompts has 131,072 tokens in each, which a few calls can send at once."""
    commands = [prefill(key, num_bytes) for key in range(num)]
    sent = [SessionRequest(commands=some) for some in messages(commands)]
    assert [c.prefill.key for message in sent for c in message.commands] == list(range(num))
    assert len(sent) == num_messages
    assert all(message.ByteSize() < MAX_MESSAGE_BYTES for message in sent)


class Owner:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_token(self, key: int, token_id: int, now: float) -> None: ...

    def on_event(self, event: Event, detail: SessionEvent | None = None) -> None:
        self.events.append(event)

    def on_logprobs(self, key: int, logprobs: Sequence[TokenLogprob]) -> None: ...


class Offers:
    """An open session to an instance with four slots.

    `freed` has the numbers of free slots that the session reported to waiting prompts.
    """

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.session = InstanceSession(InstanceRecord(instance_id="p0"), Hello(), self.on_freed)
        self.session._is_open = True
        self.owner = Owner()
        self.waiting: list[int] = []

    def on_freed(self, instance_id: str, num_free: int) -> None:
        assert instance_id == "p0"
        self.freed.append(num_free)
        for key in self.waiting[:num_free]:
            self.offer(key)
        del self.waiting[:num_free]

    def offer(self, *keys: int) -> None:
        for key in keys:
            assert self.session.open_leg(key, self.owner, prefill(key, 4))

    def told(self, *events: SessionEvent, num_free: int | None = None) -> None:
        load = None if num_free is None else Load(num_slots=4, num_slots_used=4 - num_free)
        self.session._on_response(SessionResponse(events=events, load=load))

    def leave(self, key: int) -> None:
        """Let the client of a prompt leave."""
        self.session.forget(key)
        self.session.send(Command(abort=Abort(key=key)))


async def one_slot_is_offered() -> Offers:
    offers = Offers()
    offers.told(num_free=1)
    offers.offer(1)
    await asyncio.sleep(0)
    assert not offers.session.has_slot
    offers.freed.clear()
    return offers


async def test_a_prompt_that_is_given_up_leaves_its_slot_to_a_waiter() -> None:
    """The instance may already have accepted the first prompt, so its abort is sent before the next
    prompt.
    """
    offers = await one_slot_is_offered()
    offers.waiting = [2]
    offers.leave(1)
    await asyncio.sleep(0)
    assert offers.freed == [1]
    sent = [command.WhichOneof("command") for command in offers.session._outbox]
    assert sent == ["prefill", "abort", "prefill"]


async def test_prompts_that_are_given_up_at_once_leave_all_their_slots() -> None:
    """A prefill that computes in lockstep gets its next batch when all prompts have left."""
    offers = Offers()
    offers.told(num_free=2)
    offers.offer(1, 2)
    offers.freed.clear()
    offers.leave(1)
    offers.leave(2)
    await asyncio.sleep(0)
    assert offers.freed == [2]


async def test_a_prompt_that_is_refused_for_good_leaves_its_slot_to_a_waiter() -> None:
    offers = await one_slot_is_offered()
    offers.told(SessionEvent(key=1, rejected=TOO_LONG))
    await asyncio.sleep(0)
    assert offers.freed == [1]


async def test_a_full_instance_frees_no_slot_when_prompts_leave() -> None:
    offers = Offers()
    offers.told(num_free=2)
    offers.offer(1, 2)
    offers.freed.clear()
    offers.told(SessionEvent(key=1, rejected=BUSY))
    offers.leave(2)
    await asyncio.sleep(0)
    assert offers.freed == []
    assert not offers.session.has_slot


async def test_an_accepted_prompt_frees_no_slot() -> None:
    offers = await one_slot_is_offered()
    offers.told(SessionEvent(key=1, accepted=ACCEPTED))
    offers.session.forget(1)
    await asyncio.sleep(0)
    assert offers.freed == []
    assert not offers.session.has_slot


async def test_a_prompt_that_a_load_has_counted_is_not_counted_again() -> None:
    """An instance may report its load before it has answered the latest prompts."""
    offers = Offers()
    offers.told(num_free=0)
    offers.offer(1)
    offers.told(num_free=1)
    await asyncio.sleep(0)
    assert (offers.freed, offers.session.has_slot) == ([], False), "it may not have counted it"
    offers.told(SessionEvent(key=1, accepted=ACCEPTED))
    await asyncio.sleep(0)
    assert (offers.freed, offers.session.has_slot) == ([1], True)


async def test_a_load_that_crossed_the_offer_is_corrected_by_the_one_with_the_answer() -> None:
    offers = await one_slot_is_offered()
    offers.told(num_free=1)
    offers.told(SessionEvent(key=1, accepted=ACCEPTED), num_free=0)
    await asyncio.sleep(0)
    assert offers.freed == []
    assert not offers.session.has_slot


@pytest.mark.parametrize("end", ["leaves", "rejected", "busy", "first_token", "failed", "broken"])
async def test_no_offer_outlives_its_leg(end: str) -> None:
    offers = Offers()
    offers.told(num_free=4)
    offers.offer(1, 2)
    events = {
        "rejected": SessionEvent(key=1, rejected=TOO_LONG),
        "busy": SessionEvent(key=1, rejected=BUSY),
        "first_token": SessionEvent(key=1, first_token=FirstToken(token_id=7)),
        "failed": SessionEvent(key=1, failed=Failed(reason="BUG")),
    }
    if end in events:
        offers.told(events[end])
    elif end == "leaves":
        offers.leave(1)
    else:
        offers.session._on_broken("closed", was_silent=False)
        assert offers.owner.events == [LegRejected(key, is_final=True) for key in (1, 2)]
    freed = list(offers.freed)
    assert offers.session.slots.num_offered == (0 if end == "broken" else 1)
    offers.session._on_broken("closed", was_silent=False)
    await asyncio.sleep(0)
    assert offers.session.slots.num_offered == 0
    assert offers.freed == freed, "a broken session has no slots"
