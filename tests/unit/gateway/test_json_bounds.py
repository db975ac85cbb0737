"""Bodies that would hold the event loop are refused before they are parsed, and long text is not (F31)."""

from __future__ import annotations

import json
import time

import pytest

from pdmesh.errors import InvalidRequest
from services.gateway.json_bounds import MAX_IDS, MAX_VALUES, outline
from services.gateway.openai_schema import parse_chat, parse_completion

FULL = 8 << 20


def filled(head: bytes, unit: bytes, tail: bytes) -> bytes:
    return head + unit * ((FULL - len(head) - len(tail)) // len(unit)) + tail


HEAD = b'{"model":"m","prompt":"x",'
BOMBS = {
    "objects": (filled(HEAD + b'"logit_bias":[', b"{},", b"{}]}"), "logit_bias"),
    "lists": (filled(b'{"model":"m","prompt":[', b"[],", b"[]]}"), "prompt"),
    "strings": (filled(HEAD + b'"stop":[', b'"",', b'""]}'), "stop"),
    "numbers": (filled(HEAD + b'"logit_bias":[', b"-1,", b"1]}"), "logit_bias"),
    "ids": (filled(b'{"model":"m","prompt":[', b"1,", b"1]}"), "prompt"),
    "behind escapes": (filled(b'{"user":"\\\\\\"\\\\","n":[', b"[],", b"[]]}"), "n"),
    "no json": (filled(b"", b"[", b""), None),
}


@pytest.mark.alone
@pytest.mark.fault("F31")
@pytest.mark.parametrize("case", BOMBS)
def test_too_many_values_are_refused_by_the_name_of_their_field_and_in_no_time(case: str) -> None:
    """As the parsers take them these are up to 1.6 s each."""
    body, field = BOMBS[case]
    began = time.perf_counter()
    with pytest.raises(InvalidRequest, match="holds more than") as caught:
        parse_completion(body)
    assert caught.value.field == field
    assert time.perf_counter() - began < 0.5


@pytest.mark.fault("F31")
def test_long_text_is_no_reason_to_refuse_whatever_is_in_it() -> None:
    source = 'if a[0] == {"b": [1, 2]}: print("\\n", c)\n' * 40_000
    assert parse_completion(json.dumps({"model": "m", "prompt": source}).encode()).prompt == source
    messages = [{"role": "user", "content": [{"type": "text", "text": source[:90]}]}] * 2048
    assert (
        len(parse_chat(json.dumps({"model": "m", "messages": messages}).encode()).messages) == 2048
    )
    ids = list(range(200_000))
    assert parse_completion(json.dumps({"model": "m", "prompt": ids}).encode()).prompt == ids


@pytest.mark.fault("F31")
def test_the_bounds_are_what_they_say() -> None:
    pad = b'"user":"' + b"a" * 70_000 + b'",'
    fits = b"{" + pad + b'"n":[' + b"{}," * ((MAX_VALUES - 8) // 2) + b"{}]}"
    assert outline(fits).startswith(b'{"user":"","n":[{},')
    with pytest.raises(InvalidRequest):
        outline(fits[:-2] + b"," + b"{}," * 8 + b"{}]}")
    assert outline(b"{" + pad + b'"n":[' + b"1," * (MAX_IDS - 1) + b"1]}") == b'{"user":"","n":[]}'
    with pytest.raises(InvalidRequest):
        outline(b"{" + pad + b'"n":[' + b"1," * MAX_IDS + b"1]}")


@pytest.mark.fault("F31", "F32")
@pytest.mark.parametrize("size", [300, 70_000])
@pytest.mark.parametrize(
    "bad", [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\\ud800", b"\x00", b"\n", b"\\q", b"\xe2\x82"]
)
def test_what_is_wrong_within_long_text_is_found_there_too(bad: bytes, size: int) -> None:
    text = b"a" * size + bad
    for body in (b'{"model":"m","prompt":"%b"}', b'{"model":"m","prompt":"x","user":"%b"}'):
        with pytest.raises(InvalidRequest, match="not valid JSON"):
            parse_completion(body % text)
    chat = b'{"model":"m","messages":[{"role":"user","content":"x"}],"metadata":{"k":"%b"}}'
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_chat(chat % text)


@pytest.mark.fault("F31")
@pytest.mark.parametrize("size", [3, 300, 70_000])
def test_a_field_given_twice_is_found_beside_long_text(size: int) -> None:
    text = b'\\"' + b"a" * size
    for body, field in (
        (b'{"model":"m","prompt":"%b","prompt":"x"}', "prompt"),
        (b'{"model":"m","prompt":"%b","n":1,"n":1}', "n"),
    ):
        with pytest.raises(InvalidRequest, match="twice") as caught:
            parse_completion(body % text)
        assert caught.value.field == field
    alike = b'{"model":"m","messages":[{"role":"user","content":"%b"}],"metadata":{"a\\"":1,"a":2}}'
    assert parse_chat(alike % text).metadata == {'a"': 1, "a": 2}
