"""The refusal of a request names the bad field.

Unsupported fields are accepted with their neutral values.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.chat_messages import messages_of
from pdmesh.services.gateway.openai.schema import (
    parse_chat,
    parse_completion,
    parse_tokenize,
    prompts_of,
)

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": USER, **fields}).encode()


def refused(parse: Any, body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    return caught.value


@pytest.mark.fault("F31")
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"surprise": 1}, "surprise"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 1000}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.grammar"),
        ({"echo": True}, "echo"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"chat_id": "x" * 1000}, "chat_id"),
        ({"logit_bias": {"1": 2.5, "2": 3, "3": "x", "4": 1}}, "logit_bias.3"),
        ({"logit_bias": {"1": 2, "2": None}}, "logit_bias.2"),
        ({"logit_bias": {"1": 2, "2": [], "3": "x"}}, "logit_bias.2"),
        ({"logit_bias": {"1": 2, "x" * 500: True}}, "logit_bias." + "x" * 61 + "\u2026"),
    ],
)  # fmt: skip
def test_the_refusal_of_a_chat_names_the_bad_field(fields: dict[str, Any], field: str) -> None:
    assert refused(parse_chat, chat(**fields)).field == field


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "refusal", "refusal": "no"},
    ],
)
def test_the_refusal_of_a_part_of_an_unsupported_type_names_that_part(part: dict[str, Any]) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, part]}
    error = refused(parse_chat, chat(messages=[message]))
    assert (error.field, error.reason) == ("messages[0].content[1]", "UNSUPPORTED_FIELD")


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_a_user_sends_images(role: str) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    messages = [{"role": role, "content": [part]}, {"role": "user", "content": [part]}]
    assert refused(parse_chat, chat(messages=messages)).field == "messages[0].content[0]"
    parse_chat(chat(messages=messages[1:]))


def test_an_error_names_both_bounds() -> None:
    assert refused(parse_chat, chat(max_tokens=0)).message.endswith("between 1 and 2147483648")
    assert refused(parse_chat, chat(temperature=3)).message.endswith("between 0 and 2")


def test_neutral_values_of_unsupported_fields_pass() -> None:
    request = parse_chat(
        chat(
            presence_penalty=0,
            frequency_penalty=0.0,
            logit_bias={},
            tools=None,
            tool_choice="none",
            response_format={"type": "text"},
            user="u",
            metadata={"a": "b"},
            store=False,
            service_tier="auto",
        )
    )
    assert request.user == "u"


def test_vllms_extensions_are_accepted() -> None:
    request = parse_chat(chat(ignore_eos=True, cache_salt="s", chat_id="c", scenario="x"))
    assert (request.ignore_eos, request.cache_salt, request.chat_id) == (True, "s", "c")


@pytest.mark.fault("F31", "F32")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe{}",
        b'\xef\xbb\xbf{"model":"m"}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"m","temperature":NaN,"messages":[{"role":"user","content":"x"}]}',
        b'{"model":"m","temperature":Infinity,"messages":[{"role":"user","content":"x"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"metadata":'
        + b"[" * 200_000
        + b"]" * 200_000
        + b"}",
    ],
)
def test_a_body_that_is_not_a_json_request_is_refused(body: bytes) -> None:
    assert refused(parse_chat, body).http_status == 400


NUL = "a\0b"


@pytest.mark.fault("F32")
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": NUL}, "model"),
        ({"messages": [{"role": "user", "content": NUL}]}, "messages[0].content"),
        ({"messages": [*USER, {"role": "user", "content": [{"type": "text", "text": NUL}]}]},
            "messages[1].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "name": NUL}]}, "messages[0].name"),
        ({"stop": NUL}, "stop"),
        ({"stop": ["a", NUL]}, "stop[1]"),
        ({"user": NUL}, "user"),
        ({"cache_salt": NUL}, "cache_salt"),
        ({"chat_id": NUL}, "chat_id"),
        ({"scenario": NUL}, "scenario"),
        ({"safety_identifier": NUL}, "safety_identifier"),
        ({"prompt_cache_key": NUL}, "prompt_cache_key"),
        ({"metadata": {"k": NUL}}, "metadata.k"),
        ({"metadata": {NUL: "k"}}, "metadata"),
        ({"metadata": {"k": [1, {"x": NUL}]}}, "metadata.k[1].x"),
    ],
)  # fmt: skip
def test_no_string_of_a_chat_holds_a_nul(fields: dict[str, Any], field: str) -> None:
    error = refused(parse_chat, chat(**fields))
    assert (error.field, error.http_status) == (field, 400)
    assert "U+0000" in error.message


@pytest.mark.fault("F32")
def test_no_string_of_a_completion_holds_a_nul() -> None:
    for prompt, field in ((NUL, "prompt"), (["x", NUL], "prompt[1]")):
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        assert refused(parse_completion, body).field == field
        assert (
            refused(parse_tokenize, json.dumps({"model": "m", "prompt": NUL}).encode()).field
            == "prompt"
        )
    spelt = "a backslash and \\u0000"
    body = json.dumps({"model": "m", "prompt": spelt}).encode()
    assert parse_completion(body).prompt == spelt, "the escape of a NUL in text is not a NUL"


def test_messages_reach_the_template_as_they_are() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "name": "ann", "content": parts},
        {"role": "assistant", "name": ""},
    ]
    assert messages_of(parse_chat(chat(messages=messages)).messages) == [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": ["a", "b"], "name": "ann"},
        {"role": "assistant", "content": ()},
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, expected: Any) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    assert prompts_of(parse_completion(body).prompt, vocab_size=10, max_tokens=8) == expected


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, "a"], [11], [-1], [True], [1.5], ["a"] * 17, [[1], "a"]]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    error = refused(
        lambda b: prompts_of(parse_completion(b).prompt, vocab_size=10, max_tokens=8), body
    )
    assert error.field == "prompt"


def test_completions_refuse_unsupported_fields() -> None:
    for field, value in (
        ("suffix", "x"),
        ("use_beam_search", True),
        ("best_of", 3),
        ("logprobs", 6),
    ):
        body = json.dumps({"model": "m", "prompt": "a", field: value}).encode()
        assert refused(parse_completion, body).field == field


@pytest.mark.fault("F31")
@pytest.mark.parametrize("key", [b"p\xb5", b"\xff", b"\xed\xa0\x80"])
def test_a_key_that_is_no_utf8_behind_a_wrong_value_causes_no_crash(key: bytes) -> None:
    """msgspec reports the wrong value before it has read the key."""
    body = b'{"model":"a","prompt":"x","logit_bias":{"1":"","%b":""}}' % key
    assert refused(parse_completion, body).field in ("logit_bias", "logit_bias.1")


@pytest.mark.fault("F31")
@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"model":"a","model":"b","prompt":"x"}', "model"),
        (b'{"model":"a","prompt":"x","max_tokens":1,"max_tokens":100}', "max_tokens"),
        (b'{"model":"a","prompt":"x","m\\u0061x_tokens":1,"max_tokens":2}', "max_tokens"),
        (b'{"model":"a","prompt":[' + b"1," * 900 + b'1],"n":1,"n":2}', "n"),
        (b'{"model":"a","prompt":"x","logit_bias":{"1":1,"1":2}}', "1"),
    ],
)
def test_a_field_given_twice_is_refused(body: bytes, field: str) -> None:
    error = refused(parse_completion, body)
    assert (error.reason, error.field) == ("DUPLICATE_FIELD", field)


@pytest.mark.fault("F31")
def test_a_field_given_twice_in_a_message_is_refused() -> None:
    message = b'{"role":"user","role":"system","content":"x"}'
    error = refused(parse_chat, b'{"model":"a","messages":[' + message + b"]}")
    assert (error.reason, error.field) == ("DUPLICATE_FIELD", "role")


@pytest.mark.fault("F31")
@pytest.mark.parametrize("number", [b"9" * 5000, b"1e400", b"-1e999", b"1e-400"])
def test_numbers_of_any_size_get_an_answer_and_cause_no_crash(number: bytes) -> None:
    for field in (b"seed", b"max_tokens", b"temperature", b"logit_bias", b"n"):
        body = b'{"model":"a","prompt":"x","%b":%b}' % (field, number)
        if (field, number) == (b"temperature", b"1e-400"):
            assert parse_completion(body).temperature == 0.0
        else:
            assert refused(parse_completion, body).http_status == 400


@pytest.mark.fault("F31")
def test_more_token_ids_than_the_context_has_are_refused() -> None:
    for prompt in ([1] * 9, [[1], [1] * 9]):
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        error = refused(
            lambda b: prompts_of(parse_completion(b).prompt, vocab_size=10, max_tokens=8), body
        )
        assert (error.reason, error.field) == ("CONTEXT_LENGTH_EXCEEDED", "prompt")
