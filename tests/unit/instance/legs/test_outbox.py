import asyncio
import time

import pytest

from pdmesh.engine.base import FinishReason
from pdmesh.instance.legs import convert
from pdmesh.instance.legs.outbox import MAX_PENDING, Outbox
from pdmesh.v1.instance_service_pb2 import Load, SessionResponse
from tests.support.waiting import PATIENCE_S


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outbox(clock: Clock) -> Outbox:
    return Outbox("gateway-0", stall_s=5.0, clock=clock)


async def test_tokens_of_several_steps_become_one_message_while_the_writer_is_busy(
    outbox: Outbox,
) -> None:
    for step in range(3):
        outbox.add_tokens([1, 2], [10 + step, 20 + step])
        outbox.flush()
    message = await outbox.next()
    assert message is not None
    assert list(message.tokens.keys) == [1, 2, 1, 2, 1, 2]
    assert list(message.tokens.token_ids) == [10, 20, 11, 21, 12, 22]
    assert not outbox.has_something


async def taken_within(outbox: Outbox, limit_s: float) -> SessionResponse | None:
    try:
        return await asyncio.wait_for(outbox.next(), limit_s)
    except TimeoutError:
        return None


async def test_tokens_are_sent_at_once_unless_a_message_has_just_been_sent() -> None:
    outbox = Outbox("gateway-0", stall_s=60.0, clock=time.monotonic, gap_s=3.0)
    outbox.add_tokens([7], [1])
    assert await taken_within(outbox, PATIENCE_S) is not None
    for token in (2, 3):
        outbox.add_tokens([7], [token])
        outbox.flush()
    assert await taken_within(outbox, 0.05) is None
    both = await taken_within(outbox, PATIENCE_S)
    assert both is not None
    assert list(both.tokens.token_ids) == [2, 3]


async def test_an_urgent_event_is_sent_at_once_with_all_that_was_held_back() -> None:
    outbox = Outbox("gateway-0", stall_s=60.0, clock=time.monotonic, gap_s=60.0)
    outbox.add_accepted(8)
    outbox.flush()
    assert await taken_within(outbox, 0.05) is None
    outbox.add_event(convert.finished(7, FinishReason.STOP))
    outbox.flush()
    message = await taken_within(outbox, PATIENCE_S)
    assert message is not None
    assert [event.key for event in message.events] == [8, 7]


async def test_an_event_that_only_waits_for_others_is_finally_sent_alone() -> None:
    outbox = Outbox("gateway-0", stall_s=60.0, clock=time.monotonic, gap_s=0.02)
    outbox.add_accepted(8)
    outbox.flush()
    assert await taken_within(outbox, PATIENCE_S) is not None


async def test_an_acceptance_is_left_out_if_the_same_message_has_its_outcome(
    outbox: Outbox,
) -> None:
    for key in (7, 8):
        outbox.add_accepted(key)
    outbox.add_event(convert.finished(7, FinishReason.STOP))
    message = await outbox.next()
    assert message is not None
    found = [(event.key, event.WhichOneof("event")) for event in message.events]
    assert found == [(8, "accepted"), (7, "finished")]


async def test_an_acceptance_may_be_held_back_from_messages_but_not_for_ever() -> None:
    outbox = Outbox("gateway-0", stall_s=60.0, clock=time.monotonic, gap_s=0.0)
    outbox.add_accepted(7, hold_s=60.0)
    outbox.add_accepted(8, hold_s=2.0)
    outbox.add_tokens([1], [1])
    first = await taken_within(outbox, PATIENCE_S)
    assert first is not None
    assert not first.events
    later = await taken_within(outbox, PATIENCE_S)
    assert later is not None
    assert [event.key for event in later.events] == [8]
    outbox.add_event(convert.finished(7, FinishReason.STOP))
    last = await taken_within(outbox, PATIENCE_S)
    assert last is not None
    assert [event.WhichOneof("event") for event in last.events] == ["finished"]


async def test_an_earlier_output_does_not_wait_for_a_later_one() -> None:
    outbox = Outbox("gateway-0", stall_s=60.0, clock=time.monotonic, gap_s=0.02)
    outbox.add_tokens([1], [1])
    assert await taken_within(outbox, PATIENCE_S) is not None
    outbox.add_accepted(7, hold_s=60.0)
    assert await taken_within(outbox, 0.02) is None
    outbox.add_tokens([1], [2])
    outbox.add_accepted(8)
    outbox.flush()
    assert await taken_within(outbox, PATIENCE_S) is not None


async def test_a_closing_session_sends_the_events_that_it_held_back() -> None:
    outbox = Outbox("gateway-0", stall_s=60.0, clock=time.monotonic, gap_s=60.0)
    outbox.add_accepted(8)
    outbox.close()
    assert await taken_within(outbox, PATIENCE_S) is not None
    assert await taken_within(outbox, PATIENCE_S) is None


async def test_a_load_report_is_sent_once_with_another_message(outbox: Outbox) -> None:
    outbox.set_load(Load(num_slots=4), version=1)
    outbox.add_tokens([1], [1])
    first = await outbox.next()
    outbox.add_tokens([1], [2])
    second = await outbox.next()
    assert first is not None
    assert first.load.num_slots == 4
    assert second is not None
    assert not second.HasField("load")


@pytest.mark.fault("F28")
def test_a_writer_that_stalls_with_something_to_send_is_cut_once(
    outbox: Outbox, clock: Clock
) -> None:
    cuts = []
    outbox.on_cut = lambda: cuts.append(clock.now)
    for clock.now in (0.0, 4.9, 5.1, 6.0):
        outbox.add_tokens([1], [1])
        outbox.flush()
    assert cuts == [5.1]
    assert outbox.is_closed


async def test_a_slow_writer_that_keeps_taking_is_not_cut(outbox: Outbox, clock: Clock) -> None:
    for clock.now in range(0, 40, 4):
        outbox.add_tokens([1], [1])
        outbox.flush()
        assert await outbox.next() is not None
    assert not outbox.is_closed


@pytest.mark.fault("F28")
def test_the_pending_output_is_bounded(outbox: Outbox) -> None:
    while not outbox.is_closed:
        outbox.add_tokens(range(1000), range(1000))
        outbox.flush()
        assert outbox.num_pending <= MAX_PENDING + 1000


async def test_output_before_the_end_is_still_sent(outbox: Outbox) -> None:
    outbox.add_tokens([1], [9])
    outbox.close()
    last = await outbox.next()
    assert last is not None
    assert list(last.tokens.token_ids) == [9]
    assert await outbox.next() is None
