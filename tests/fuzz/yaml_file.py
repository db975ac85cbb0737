"""Fuzzes the reader of the desired state with any text that an operator may send.

`feed` raises only if one of these promises is broken. The reader turns a text into a desired state,
or raises a short InvalidRequest that names a line. A desired state passes all checks of `problems`.
The same text gives the same state when it is read again.
"""

from __future__ import annotations

from typing import Final

from pdmesh.core.groups.desired import problems
from pdmesh.desired_file import MAX_COUNT, MAX_GROUPS, read
from pdmesh.errors import InvalidRequest
from tests.fuzz import errors

MAX_LEN: Final = 8_192


def feed(data: bytes) -> None:
    text = data.decode(errors="replace")
    try:
        desired = read(text)
    except InvalidRequest as exc:
        errors.check(exc)
        return
    assert not list(problems(desired)), "an accepted state has no problems"
    assert len(desired.groups) <= MAX_GROUPS
    for group in desired.groups.values():
        assert 0 <= group.prefill <= MAX_COUNT
        assert 0 <= group.decode <= MAX_COUNT
    assert read(text) == desired


def honest() -> bytes:
    lines = [f"  chat-{i}: {{prefill: 2, decode: 2}}" for i in range(MAX_LEN // 40)]
    return ("groups:\n" + "\n".join(lines) + "\n").encode()


_SERVICES: Final = """\
services:
  a: {model: m, options: {num_slots: 8}, role_options: {prefill: {dtype: float32}}}
scenarios:
  b: {service: a, allow_single: true, ratio: auto, slo: {ttft_s: 1}, upgrade: {soak_s: 1}}
groups:
  c: {scenario: b, prefill: 1, decode: 1, count: 2, racks: [r]}
"""
_SCHEDULES: Final = """\
schedules:
  - {at: "0 8 * * *", timezone: Europe/Berlin, do: add, group: chat, prefill: 1}
groups:
  chat: {prefill: 2, decode: 2}
"""


def seeds() -> dict[str, bytes]:
    texts = [
        "regions: [eu, us]\ngroups:\n  chat: {prefill: 2, decode: 2, region: eu, failover: [us]}\n",
        _SERVICES,
        _SCHEDULES,
        "a: &x [1]\nb: *x\n",
        "groups: !!python/object:os.system {}\n---\n",
        "{" * 20,
        "groups:\n  chat: {prefill: -1, prefill: 2}\n",
        "\ufeffgroups: ~\n",
    ]
    return {f"text-{i:02}": text.encode() for i, text in enumerate(texts)}
