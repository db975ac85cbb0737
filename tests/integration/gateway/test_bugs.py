"""Tests that a bug in the gateway makes only one request fail."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from pdmesh.core.request.events import LegFinished
from pdmesh.services.gateway.request import generation
from pdmesh.services.gateway.routing.sessions import InstanceSession
from tests.fakes.gateway_mesh import GatewayMesh
from tests.support.logs import capture_logs_of
from tests.support.waiting import until


def break_first_send(mesh: GatewayMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the gateway fail when it sends a request to an instance for the first time, as if a
    value did not fit into the message.
    """
    sessions = mesh.gateway.sessions
    real = sessions.session
    calls = 0

    def first_fails(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("value out of range")
        return real(*args)

    monkeypatch.setattr(sessions, "session", first_fails)


async def test_a_request_that_meets_a_bug_fails_alone(
    mesh: GatewayMesh,
    client: openai.AsyncOpenAI,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One loop of the planner hands plans to all requests. An exception in one request must not end
    this loop.
    """
    break_first_send(mesh, monkeypatch)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model="tiny", prompt="abc", max_tokens=4)
    assert "value out of range" not in str(caught.value)
    answer = await client.completions.create(model="tiny", prompt="abc", max_tokens=4)
    assert answer.choices[0].text == mesh.expected_text("abc", 4)
    await until(lambda: mesh.num_legs == 0)
    assert mesh.gateway.frontend.num_calls == 0
    assert mesh.gateway.observer.num_ended["failed"] == 1


async def test_an_impossible_event_ends_one_request_and_is_logged_with_its_story(
    mesh: GatewayMesh,
    client: openai.AsyncOpenAI,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An instance reports the end of a request that it has not even accepted yet."""
    real = InstanceSession.open_leg

    def finishes_at_once(session: Any, key: int, owner: Any, command: Any) -> bool:
        monkeypatch.setattr(InstanceSession, "open_leg", real)
        is_open = real(session, key, owner, command)
        owner.on_event(LegFinished(key, "stop"))
        return is_open

    monkeypatch.setattr(InstanceSession, "open_leg", finishes_at_once)
    logs = capture_logs_of(generation, monkeypatch)
    with pytest.raises(openai.InternalServerError):
        await client.completions.create(model="tiny", prompt="abc", max_tokens=4)
    (told,) = (entry for entry in logs if entry["event"] == "generation.bug")
    steps = ["Submitted", "AskPlan", "PlanReceived", "SendPrefill", "LegFinished"]
    places = [told["last_events"].index(step) for step in steps]
    assert places == sorted(places)
    answer = await client.completions.create(model="tiny", prompt="abc", max_tokens=4)
    assert answer.choices[0].text == mesh.expected_text("abc", 4)
    await until(lambda: mesh.num_legs == 0)
    assert mesh.gateway.observer.num_ended["failed"] == 1
