"""The instances that are told when a chat session pauses, resumes or ends.

A hint names the blocks that it is about.
"""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from pdmesh.core.kv.tiers.session_holds import SessionState
from pdmesh.services.gateway.routing.session_hints import ServedChoice, SessionHints
from pdmesh.services.gateway.text.prompt import Prompt
from pdmesh.v1.common_pb2 import (
    SESSION_STATE_DONE,
    SESSION_STATE_PAUSED_FOR_TOOL,
    SESSION_STATE_RESUMED,
    InstanceRecord,
)
from pdmesh.v1.instance_service_pb2 import Command, SessionHint

PAUSED, RESUMED, DONE = SessionState.PAUSED_FOR_TOOL, SessionState.RESUMED, SessionState.DONE
ANSWER = list(range(40))


def prompt_of(tenant: str = "t", salt: str = "") -> Prompt:
    return Prompt(array("I", [5] * 40), b"secret", tenant, salt)


PROMPT = prompt_of()


class Instances:
    """Stands in for fleet and sessions. It records each hint and its receiver."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, SessionHint]] = []
        self.now = 0.0
        self.told = SessionHints(self._self, self._self, hold_s=60.0, clock=lambda: self.now)

    @property
    def _self(self) -> Any:
        return self

    def instance(self, instance_id: str) -> InstanceRecord | None:
        if not instance_id:
            return None
        return InstanceRecord(
            instance_id=instance_id,
            model_fingerprint="f",
            block_size=16,
            takes_session_hints=not instance_id.startswith("no-pool"),
        )

    def hint(self, record: InstanceRecord, command: Command) -> None:
        self.sent.append((record.instance_id, command.session_hint))

    def ended(self, state: SessionState, *ids: str, session: str = "s") -> list[tuple[str, int]]:
        """End a call on these instances. Without instances, the call has failed.

        Returns the instances that got a hint, each with the number of blocks in it.
        """
        self.sent.clear()
        served = [ServedChoice(PROMPT, ANSWER, ids)] if ids else []
        self.told.ended(session, state, PROMPT, served)
        return [(instance_id, len(hint.block_hashes)) for instance_id, hint in self.sent]


@pytest.fixture
def instances() -> Instances:
    return Instances()


@pytest.mark.req("S108")
@pytest.mark.parametrize(
    ("state", "sent"), [(RESUMED, SESSION_STATE_RESUMED), (DONE, SESSION_STATE_DONE)]
)
def test_who_was_told_of_the_pause_is_told_of_its_end(
    instances: Instances, state: SessionState, sent: int
) -> None:
    assert instances.ended(PAUSED, "a", "d") == [("a", 4), ("d", 4)]
    assert instances.ended(state, "b", "d") == [("b", 4), ("d", 4), ("a", 0)]
    assert {hint.state for _, hint in instances.sent} == {sent}
    assert instances.ended(state, "b") == [("b", 4)], "it is told once"


@pytest.mark.req("S108")
@pytest.mark.parametrize("state", [RESUMED, DONE])
def test_a_call_that_fails_ends_the_pause_as_well(
    instances: Instances, state: SessionState
) -> None:
    instances.ended(PAUSED, "a", "no-pool")
    assert instances.ended(state, session="other") == []
    assert instances.ended(state) == [("a", 0)]


def test_all_pauses_of_a_session_end_together(instances: Instances) -> None:
    instances.ended(PAUSED, "a")
    instances.ended(PAUSED, "b", "a")
    instances.ended(PAUSED)
    assert instances.ended(DONE, "c") == [("c", 4), ("b", 0), ("a", 0)]
    instances.ended(PAUSED, *(f"i{n}" for n in range(40)))
    assert instances.ended(DONE) == [(f"i{n}", 0) for n in range(24, 40)]


def test_pauses_are_forgotten_with_their_time(instances: Instances) -> None:
    instances.ended(PAUSED, "a")
    instances.now = 60.0
    assert instances.ended(DONE) == []


@pytest.mark.req("S108")
def test_of_several_choices_an_instance_is_told_once_and_of_the_prompt_alone(
    instances: Instances,
) -> None:
    choices = [
        ServedChoice(PROMPT, ANSWER, ("a", "d")),
        ServedChoice(PROMPT, ANSWER[::-1], ("b", "d")),
    ]
    instances.told.ended("s", PAUSED, PROMPT, choices)
    assert [(i, list(hint.block_hashes)) for i, hint in instances.sent] == [
        (i, PROMPT.hashes(InstanceRecord(model_fingerprint="f", block_size=16)))
        for i in ("a", "d", "b")
    ]
    assert {hint.state for _, hint in instances.sent} == {SESSION_STATE_PAUSED_FOR_TOOL}


def test_a_tenant_has_one_name_under_all_its_salts_and_no_other_has_it() -> None:
    assert prompt_of(salt="x").tenant_key == prompt_of(salt="y").tenant_key
    assert prompt_of().tenant_key != prompt_of("u").tenant_key
    assert prompt_of().tenant_key != Prompt(array("I"), b"other", "t", "").tenant_key
