"""Bodies that would block the event loop for long are refused before they are parsed (F31).

Long text is accepted.
"""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.json_bounds import (
    MAX_IDS,
    MAX_OUTSIDE_BYTES,
    MAX_VALUES,
    outline,
)
from pdmesh.services.gateway.openai.schema import parse_chat, parse_completion

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
    "ids in lists": (filled(b'{"model":"m","prompt":[', b"[%b1]," % (b"1," * 9999), b"[]]}"),
        "prompt"),
    "behind escapes": (filled(b'{"user":"\\\\\\"\\\\","n":[', b"[],", b"[]]}"), "n"),
    "names": (filled(b"{", b'"a":1,', b'"a":1}'), None),
    "junk beside a long text": (
        b'{"model":"m","prompt":"%b",%b"n":1}'
        % (b"a,[" * (1 << 20), b"".join(b'"junk%d":1,' % n for n in range(30_000))),
        None,
    ),
    "few ids beside many": (
        b'{"prompt":[%b1],"m":"%b","n":[%b1]}' % (b"1," * 9, b"a" * (1 << 22), b"1," * MAX_IDS),
        "n",
    ),
    "no json": (filled(b"", b"[", b""), None),
    "space in front": (filled(b"", b" ", b'{"model":"m","prompt":"x"}'), None),
    "space within": (filled(HEAD, b"\n", b'"n":1}'), None),
    "digits": (filled(HEAD + b'"n":', b"1", b"}"), None),
    "a fraction": (filled(HEAD + b'"top_p":0.', b"1", b"}"), None),
    "letters": (filled(HEAD + b'"n":', b"a", b"}"), None),
    "an open list": (filled(b'{"model":"m","prompt":[', b"1 ", b""), None),
}  # fmt: skip
REFUSED_ANYHOW = {
    "an open string": filled(b'{"model":"m","prompt":"', b"a", b""),
    "open strings": filled(HEAD + b'"user":"', b'\\"', b""),
    "an open escape": filled(b'{"model":"m","prompt":"', b"\\\\", b"\\"),
    "a long name": filled(b'{"', b"a`", b'":1}'),
    "a long wrong value": filled(b'{"model":"m","prompt":"x","stream":"', b"a\\n", b'"}'),
    "NULs": filled(b'{"model":"m","prompt":"', b"\\u0000", b'"}'),
}


def cost(body: bytes) -> float:
    """The CPU time to parse the body. The least of three runs is taken, so that other processes
    matter little.
    """
    return min(timed(body) for _ in range(3))


def timed(body: bytes) -> float:
    began = time.thread_time()
    with contextlib.suppress(InvalidRequest):
        parse_completion(body)
    return time.thread_time() - began


@pytest.mark.fault("F31")
@pytest.mark.parametrize("case", BOMBS)
def test_the_refusal_of_too_many_values_names_their_field(case: str) -> None:
    body, field = BOMBS[case]
    with pytest.raises(InvalidRequest, match="holds more than") as caught:
        parse_completion(body)
    assert caught.value.field == field


@pytest.mark.fault("F31")
def test_a_body_costs_no_more_than_an_honest_one_of_its_size() -> None:
    """Without the bounds, the parsers would take 30 times as long for the worst bodies."""
    honest = max(
        cost(filled(b'{"model":"m","prompt":[', b"1234567,", b"1]}")),
        cost(filled(b'{"model":"m","prompt":"', b'say \\"no\\"\\n ', b'"}')),
    )
    bodies = {name: body for name, (body, _) in BOMBS.items()} | REFUSED_ANYHOW
    costs = {name: cost(body) / honest for name, body in bodies.items()}
    assert max(costs.values()) < 3, costs


@pytest.mark.fault("F31")
def test_a_field_given_twice_is_found_in_one_pass_over_the_names() -> None:
    names = b",".join(b'"k%d":1' % i for i in range(10_000))
    once, twice = (
        b'{"model":"m","prompt":"x","logit_bias":{%b}}' % inner
        for inner in (names, names + b',"k9999":2')
    )
    with pytest.raises(InvalidRequest, match="k9999 is given twice"):
        parse_completion(twice)
    assert cost(twice) < 5 * cost(once)


@pytest.mark.fault("F31")
@pytest.mark.parametrize("size", [400, 60_000, FULL])
def test_an_error_shortens_the_clients_text(size: int) -> None:
    long = b"a" * (size - 200)
    bodies = (
        b'{"model":"m","prompt":"x","%b":1}' % long,
        b'{"model":"m","prompt":"x","logit_bias":{"%b":1,"%b":2}}' % (long[:30_000], long[:30_000]),
        b'{"model":"m","prompt":"x","stream_options":{"%b":1}}' % long,
        b'{"model":"m","prompt":"x","stream":"%b"}' % long,
        b'{"model":"m","prompt":"x","seed":%b}' % (b"1" * (size - 200)),
        b'{"%b":[%b]}' % (long[:200], b"{}," * 40_000 + b"{}"),
    )
    for body in bodies:
        with pytest.raises(InvalidRequest) as caught:
            parse_completion(body)
        error = caught.value
        assert len(error.message) + len(error.field or "") + len(str(error)) < 1000
        assert error.__context__ is None or len(str(error.__context__)) < 1000
    messages = b'{"model":"m","messages":[{"role":"%b","content":"x"}]}'
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(messages % long)
    assert caught.value.field == "messages[0].role"
    assert len(caught.value.message) < 1000


@pytest.mark.fault("F31")
def test_long_text_is_accepted_with_any_content() -> None:
    source = 'if a[0] == {"b": [1, 2]}: print("\\n", c)\n' * 40_000
    assert parse_completion(json.dumps({"model": "m", "prompt": source}).encode()).prompt == source
    messages = [{"role": "user", "content": [{"type": "text", "text": source[:90]}]}] * 2048
    assert (
        len(parse_chat(json.dumps({"model": "m", "messages": messages}).encode()).messages) == 2048
    )
    ids = list(range(200_000))
    assert parse_completion(json.dumps({"model": "m", "prompt": ids}).encode()).prompt == ids


def parse_fails(body: bytes) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(body)
    return caught.value.message


@pytest.mark.fault("F31")
def test_values_at_the_bounds_pass_and_those_beyond_are_refused() -> None:
    pad = b'"user":"' + b"a" * 70_000 + b'",'
    fits = b"{" + pad + b'"n":[' + b"{}," * ((MAX_VALUES - 8) // 2) + b"{}]}"
    assert outline(fits).startswith(b'{"user":"","n":[{},')
    spaces = b"{" + b" " * (MAX_OUTSIDE_BYTES - 8) + b'"n":1}'
    assert parse_fails(spaces) == "missing field: model"
    with pytest.raises(InvalidRequest, match="besides text"):
        outline(b" " * 8 + spaces)
    with pytest.raises(InvalidRequest, match="name of a field") as caught:
        outline(b"{" + pad + b'"' + b"b" * 257 + b'" : 1}')
    assert caught.value.field == "b" * 61 + "…"
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
def test_errors_within_long_text_are_found(bad: bytes, size: int) -> None:
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
