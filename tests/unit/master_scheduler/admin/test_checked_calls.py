"""Every method of the admin API needs a role, and every change is published as an event."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from google.protobuf.message import Message

from pdmesh.core.access.operator_roles import NEEDED, AdminRole
from pdmesh.errors import NotAllowed
from pdmesh.events.v1.events_pb2 import AdminChange
from pdmesh.net import subjects
from pdmesh.net.bus import Message as BusMessage
from pdmesh.net.events import EventPublisher, decode_event
from pdmesh.services.master_scheduler.admin.audit import AuditTrail, Changed, of_versions, state_of
from pdmesh.services.master_scheduler.admin.callers import AdminCaller
from pdmesh.services.master_scheduler.admin.checked_calls import CheckedCalls
from pdmesh.v1 import admin_service_pb2 as pb
from tests.fakes.memory_bus import MemoryBus
from tests.support.waiting import until


class Servicer:
    """Records the called methods. Each method that may change something does so."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, method: str) -> Any:
        async def call(request: Message, caller: AdminCaller) -> Any:
            self.called.append(method)
            answer = pb.ListPinsResponse()
            if NEEDED[method] == AdminRole.VIEWER:
                return answer
            return Changed(answer, "x", {"was": 1}, {"is": 2}, "because", "bob")

        return call


class Access:
    def __init__(self, role: AdminRole | None) -> None:
        self.role = role

    async def caller(self, _: Any) -> AdminCaller:
        return AdminCaller("ann", "token", self.role, "ipv4:10.0.0.7:1")


async def heard(bus: MemoryBus) -> list[AdminChange]:
    events: list[AdminChange] = []

    async def on_event(message: BusMessage) -> None:
        events.append(decode_event(message, AdminChange))

    await bus.subscribe(subjects.admin_changed(), on_event)
    return events


def calls_of(servicer: Any, access: Any, bus: MemoryBus) -> Any:
    return CheckedCalls(servicer, access, AuditTrail(EventPublisher(bus, "m", 1), "m"))


@pytest.mark.parametrize(("method", "role"), list(itertools.product(NEEDED, [None, *AdminRole])))
async def test_a_method_runs_only_for_its_role_and_its_change_is_told_once(
    method: str, role: AdminRole | None
) -> None:
    servicer, bus = Servicer(), MemoryBus()
    events = await heard(bus)
    call = getattr(calls_of(servicer, Access(role), bus), method)
    if role is None or role < NEEDED[method]:
        with pytest.raises(NotAllowed) as refused:
            await call(None, None)
        said = f"{method} needs the role {NEEDED[method]}; ann has {role or 'none'}"
        assert refused.value.message == said
        assert servicer.called == []
        assert events == []
        return
    assert isinstance(await call(None, None), pb.ListPinsResponse)
    assert servicer.called == [method]
    num_expected = 0 if NEEDED[method] == AdminRole.VIEWER else 1
    await until(lambda: len(events) >= num_expected)
    for event in events:
        event.ClearField("header")
    expected = AdminChange(
        who="ann", shown_by="token", role=str(role), author="bob", address="ipv4:10.0.0.7:1",
        action=method, about="x", reason="because",
    )  # fmt: skip
    expected.before["was"], expected.after["is"] = 1, 2
    assert events == [expected] * num_expected


async def test_a_change_is_answered_and_logged_although_nats_is_away(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bus = MemoryBus()
    bus.server.is_up = False
    await calls_of(Servicer(), Access(AdminRole.ADMIN), bus).ApplyDesired(None, None)
    assert "admin.changed" in capsys.readouterr().out


def test_a_state_is_a_message_without_what_is_left_out() -> None:
    pin = pb.Pin(pin_id="a", num_tokens=7)
    pin.blocks.add(model_fingerprint="f", names=[b"x" * 16])
    assert state_of(pin, "blocks") == {"pin_id": "a", "num_tokens": 7}
    assert state_of(None) == {}


def test_two_versions_are_told_by_what_differs_within_bounds() -> None:
    changes = [
        pb.DesiredChange(path="a", before="1", after="2"),
        pb.DesiredChange(path="b", after="x"),
    ]
    before, after = of_versions((3, 4), changes)
    assert before == {"version": 3, "values": {"a": "1"}}
    assert after == {"version": 4, "values": {"a": "2", "b": "x"}}
    many = [pb.DesiredChange(path=str(i), after="x" * 10_000) for i in range(5000)]
    before, after = of_versions((3, 4), many)
    assert after["num_not_told"] == before["num_not_told"] == 4900
    assert sum(len(value) for value in after["values"].values()) < 60_000
