"""The shell of one choice of a call carries out effects in order.

Token 1 is sent to the client first.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.core.request.events import (
    Candidate,
    FirstToken,
    LegAccepted,
    PlanReceived,
    RequestLimits,
    TicketHeld,
)
from pdmesh.core.request.retry_budget import RetryBudget
from pdmesh.core.request.slo import Slos
from pdmesh.services.gateway.request.generation import Generation
from pdmesh.services.gateway.request.leg_commands import ChoiceIdentity
from pdmesh.services.gateway.request.spec import CallSpec, SamplingSpec
from pdmesh.services.gateway.request.waiting import Waiting
from pdmesh.services.gateway.text.prompt import Prompt
from pdmesh.v1.common_pb2 import InstanceRecord, Ticket
from pdmesh.v1.instance_service_pb2 import Command, KvTransfer

PREFILL, DECODE = Candidate("p0", 1, "g"), Candidate("d0", 1, "g")
TICKET = TicketHeld("t1", 10.0, Ticket(ticket_id="t1"))


class Instance:
    """Stands in for a session. All instances record their commands in one list."""

    worked = None
    has_slot = True

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def open_leg(self, key: int, owner: object, command: Command) -> bool:
        self.send(command)
        return True

    def send(self, command: Command) -> None:
        self.log.append(str(command.WhichOneof("command")))

    def forget(self, key: int) -> None: ...


def write_soon(log: list[str]) -> None:
    asyncio.get_running_loop().call_soon(log.append, "written")


def offered_to_a_decode(log: list[str]) -> Generation:
    """A choice for which the prefill has just drawn token 1."""
    keys, instance, nothing = itertools.count(1), Instance(log), SimpleNamespace()
    nothing.flush = nothing.feed = lambda *_: ""
    nothing.has_stops = False
    shared: Any = SimpleNamespace(
        fleet=SimpleNamespace(
            record=lambda instance_id, incarnation: InstanceRecord(instance_id=instance_id),
            reference=lambda model: None,
        ),
        sessions=SimpleNamespace(session=lambda record: instance),
        planner=SimpleNamespace(ask=lambda *_: None),
        refusal=lambda *_: None,
        room=Waiting(8),
        budget=RetryBudget(),
        limits=RequestLimits(),
        slos=Slos(RequestLimits()),
        next_key=lambda: next(keys),
        answer_kv=SimpleNamespace(prompted=lambda *_: None, answered=lambda *_: None),
        kv_transfer=lambda scenario: KvTransfer.KV_TRANSFER_UNSPECIFIED,
    )
    tokens = array("I", [1, 2, 3])
    tokenizer: Any = SimpleNamespace(
        eos_token_ids=frozenset(), vocabulary="", text_stream=lambda *_: nothing
    )
    spec = CallSpec("chat", "m", (tokens,), SamplingSpec(), tokenizer)
    generation = Generation(
        shared,
        spec,
        Prompt(tokens, b"s", "", ""),
        ChoiceIdentity("r", 0, max_tokens=8),
        on_tokens=lambda: write_soon(log),
        on_end=lambda: log.append("ended"),
    )
    generation.start()
    generation.on_event(PlanReceived(1, [PREFILL], [DECODE]))
    generation.on_event(LegAccepted(1))
    generation.on_event(FirstToken(1, 7, ticket=TICKET))
    return generation


@pytest.mark.req("S48")
async def test_token_1_is_written_before_the_hand_over_begins() -> None:
    log: list[str] = []
    generation = offered_to_a_decode(log)
    assert log == ["prefill"]
    await asyncio.sleep(0)
    assert log == ["prefill", "written", "start"]
    generation.cancel()


@pytest.mark.fault("F27")
async def test_a_client_that_leaves_cancels_the_pending_commands() -> None:
    log: list[str] = []
    offered_to_a_decode(log).cancel()
    assert log == ["prefill", "start", "abort", "release", "ended"]
    await asyncio.sleep(0)
    assert log == ["prefill", "start", "abort", "release", "ended", "written"], (
        "no command is sent twice"
    )
