"""A prefill is told which decode has the KV of an answer.

The prefill can then fetch this KV before the chat's next turn.

The message includes the chance that the chat continues.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.services.gateway.request import answer_kv as answer_kv_module
from pdmesh.services.gateway.request.answer_kv import AnswerKv
from pdmesh.services.gateway.text.prompt import Prompt
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL, InstanceRecord
from pdmesh.v1.instance_service_pb2 import Command
from tests.support.logs import capture_logs_of

ANSWER = list(range(40))


def record(name: str, addresses: int = 1, **changes: Any) -> InstanceRecord:
    found = InstanceRecord(
        instance_id=name,
        incarnation=len(name),
        role=ROLE_PREFILL if name.startswith("prefill") else ROLE_DECODE,
        model_fingerprint="f",
        block_size=16,
        kv_addresses=[f"address of {name}"] * addresses,
        fetches_from_peers=True,
        takes_prefetches=True,
    )
    for key, value in changes.items():
        setattr(found, key, value)
    return found


@dataclass
class Fleet:
    records: dict[str, InstanceRecord]

    def instance(self, instance_id: str) -> InstanceRecord | None:
        return self.records.get(instance_id)

    def reference(self, model: str) -> InstanceRecord | None:
        return next(iter(self.records.values()), None)


@dataclass
class Sessions:
    """Stands in for the sessions of all instances. It records each command and its receiver."""

    sent: list[tuple[str, Command]] = field(default_factory=list)

    def hint(self, record: InstanceRecord, command: Command) -> None:
        self.sent.append((record.instance_id, command))


@dataclass
class Spec:
    operation: str = "chat"
    base_model: str = "m"
    scenario: str = ""


def prompt_of(tokens: list[int]) -> Prompt:
    return Prompt(array("I", tokens), b"secret", "tenant", "")


PROMPT = prompt_of([5] * 20)


def answer_kv(*records: InstanceRecord, is_on: bool = True) -> tuple[AnswerKv, Sessions]:
    sessions = Sessions()
    fleet: Any = Fleet({r.instance_id: r for r in records})
    served: Any = sessions
    return AnswerKv(fleet, served, is_on=is_on), sessions


def answered(
    kv: AnswerKv,
    operation: str = "chat",
    decode: str = "decode-0",
    answer: list[int] = ANSWER,
) -> None:
    spec: Any = Spec(operation)
    kv.answered(spec, PROMPT, answer, "prefill-0", decode)


def test_the_prefill_is_told_the_answers_blocks_and_which_decode_has_them() -> None:
    kv, sessions = answer_kv(record("prefill-0"), record("decode-0"))
    answered(kv)
    ((to, command),) = sessions.sent
    told = command.prefetch
    assert (to, told.peer.instance_id, told.peer.incarnation) == ("prefill-0", "decode-0", 8)
    assert told.kv_addresses == ["address of decode-0"]
    assert list(told.block_hashes) == PROMPT.answer_hashes(record("prefill-0"), ANSWER)
    assert len(told.block_hashes) == 2
    assert told.cache_salt == PROMPT.root("f").hex()
    assert 0 < told.chance < 1


@pytest.mark.parametrize(
    ("records", "case"),
    [
        ((record("prefill-0"), record("decode-0")), {"operation": "text_completion"}),
        ((record("prefill-0"), record("decode-0")), {"decode": "prefill-0"}),
        ((record("prefill-0"), record("decode-0")), {"decode": "decode-that-is-gone"}),
        ((record("prefill-0", takes_prefetches=False), record("decode-0")), {}),
        ((record("prefill-0"), record("decode-0", fetches_from_peers=False)), {}),
        ((record("prefill-0"), record("decode-0", kv_region="far")), {}),
        ((record("prefill-0"), record("decode-0", model_fingerprint="g")), {}),
        ((record("prefill-0", is_draining=True), record("decode-0")), {}),
        ((record("prefill-0"), record("decode-0", is_draining=True)), {}),
        ((record("prefill-0"), record("decode-0", addresses=2)), {}),
        ((record("prefill-0", addresses=0), record("decode-0", addresses=0)), {}),
        ((record("prefill-0"), record("decode-0")), {"answer": ANSWER[:1]}),
        ((record("prefill-0"), record("decode-0")), {"answer": []}),
    ],
)
def test_where_it_cannot_help_nothing_is_told(
    records: tuple[InstanceRecord, ...], case: dict[str, Any]
) -> None:
    kv, sessions = answer_kv(*records)
    answered(kv, **case)
    assert sessions.sent == []


def test_it_can_be_off() -> None:
    kv, sessions = answer_kv(record("prefill-0"), record("decode-0"), is_on=False)
    answered(kv)
    assert (sessions.sent, len(kv.reuse)) == ([], 0)


def later_prompt(answer: list[int]) -> Prompt:
    return prompt_of([5] * 20 + answer + [7] * 9)


def test_the_chance_rises_when_chats_go_on() -> None:
    kv, sessions = answer_kv(record("prefill-0"), record("decode-0"))
    spec: Any = Spec()
    answered(kv)
    kv.prompted(spec, later_prompt(ANSWER[::-1]))
    answered(kv)
    kv.prompted(spec, later_prompt(ANSWER))
    answered(kv)
    first, second, third = (command.prefetch.chance for _, command in sessions.sent)
    assert first == second < third


def test_prompts_of_a_group_with_another_fingerprint_are_recognised() -> None:
    """The first instance of the model is in another group than the chat."""
    kv, sessions = answer_kv(
        record("other-prefill", model_fingerprint="g"), record("prefill-0"), record("decode-0")
    )
    spec: Any = Spec()
    answered(kv)
    kv.prompted(spec, later_prompt(ANSWER))
    answered(kv)
    first, second = (command.prefetch for _, command in sessions.sent)
    assert first.block_hashes == PROMPT.answer_hashes(record("prefill-0"), ANSWER)
    assert first.chance < second.chance


def test_where_chats_do_not_go_on_nothing_is_told_any_more() -> None:
    kv, sessions = answer_kv(record("prefill-0"), record("decode-0"))
    followed: list[int] = []
    unlikely: Any = SimpleNamespace(
        chance=lambda scope: 0.01, answered=lambda *_: followed.append(1)
    )
    kv.reuse = unlikely
    answered(kv)
    assert (sessions.sent, followed) == ([], [1])


def test_an_error_of_the_hint_reaches_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, sessions = answer_kv(record("prefill-0"), record("decode-0"))
    monkeypatch.setattr(sessions, "hint", None)
    lines = capture_logs_of(answer_kv_module, monkeypatch)
    answered(kv)
    assert [line["event"] for line in lines] == ["answer_kv.bug"]
