"""Unknown fields of a request are ignored and reported."""

from __future__ import annotations

import json

from pdmesh.services.gateway.openai.schema import parse_chat, parse_completion
from pdmesh.services.gateway.openai.unknown_fields import HEADER, header_of


def test_unknown_fields_are_named_by_their_path_at_every_level() -> None:
    body = {
        "model": "m",
        "future": {"deep": [1, 2]},
        "temperature": 1,
        "stream": True,
        "stream_options": {"include_usage": True, "odd": 1},
        "messages": [
            {"role": "system", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b", "odd": 2}], "odd": 3},
        ],
    }
    ignored: list[str] = []
    request = parse_chat(json.dumps(body).encode(), ignored)
    assert sorted(ignored) == [
        "future", "messages[1].content[0].odd", "messages[1].odd", "stream_options.odd",
    ]  # fmt: skip
    assert request.temperature == 1.0
    assert request.messages[1].content[0].text == "b"  # type: ignore[index,union-attr]


def test_a_request_without_unknown_fields_reports_none() -> None:
    ignored: list[str] = []
    parse_completion(b'{"model":"m","prompt":[1,2]}', ignored)
    assert ignored == []


def test_at_most_sixteen_unknown_fields_are_reported() -> None:
    body = {"model": "m", "prompt": "a"} | {f"f{n}": n for n in range(1000)}
    ignored: list[str] = []
    parse_completion(json.dumps(body).encode(), ignored)
    assert ignored == [f"f{n}" for n in range(16)], "the first sixteen"


def test_the_header_has_only_allowed_bytes_and_a_bounded_length() -> None:
    name, value = header_of(["a\r\nset-cookie: x", "\u00fc,b", "y" * 10_000])
    assert name == HEADER
    assert all(0x20 <= byte < 0x7F for byte in value)
    assert value.count(b", ") == 2
    assert len(value) < 1000
