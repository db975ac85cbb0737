"""Fuzzes the parsers of OpenAI requests with any body that a client may send.

`feed` raises only if one of these promises is broken. A parser turns a body into a request or
raises a short InvalidRequest. An accepted body has the values that the standard library's parser
finds in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.chat_messages import messages_of
from pdmesh.services.gateway.openai.schema import (
    parse_chat,
    parse_completion,
    parse_tokenize,
    prompts_of,
)
from tests.fuzz import errors

MAX_LEN: Final = 32_768
_PARSERS: Final[tuple[Callable[[bytes], Any], ...]] = (parse_chat, parse_completion, parse_tokenize)
_VOCABULARY, _MAX_TOKENS = 1000, 64


def feed(data: bytes) -> None:
    """Feed one input. Its first byte selects the endpoint."""
    if not data:
        return
    body = data[1:]
    try:
        request = _PARSERS[data[0] % len(_PARSERS)](body)
        if getattr(request, "messages", None):
            for message in messages_of(request.messages):
                assert set(message) >= {"role", "content"}
        elif request.prompt is not None:
            prompts_of(request.prompt, _VOCABULARY, _MAX_TOKENS)
    except InvalidRequest as exc:
        errors.check(exc)
        return
    seen = json.loads(body, object_pairs_hook=_once)
    assert seen["model"] == request.model
    assert seen.get("max_tokens") == getattr(request, "max_tokens", None)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    assert len(found) == len(pairs), "a duplicate field was accepted"
    return found


def honest() -> bytes:
    return b'\1{"model":"m","prompt":"' + b"a b " * (MAX_LEN // 4 - 8) + b'"}'


def seeds() -> dict[str, bytes]:
    chat = {
        "model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "max_tokens": 3,
        "temperature": 0.5, "top_p": 1, "n": 2, "seed": -1, "stop": ["a"], "stream": True,
        "logprobs": True,
        "stream_options": {"include_usage": True}, "top_logprobs": 2, "metadata": {"k": "v"},
    }  # fmt: skip
    completion = {
        "model": "m", "prompt": [1, 2, 3], "logprobs": 1, "echo": False, "best_of": 1, "suffix": "",
        "logit_bias": {}, "scenario": "s", "chat_id": "c", "cache_salt": "x", "ignore_eos": True,
    }  # fmt: skip
    bodies: list[tuple[int, bytes]] = [
        (0, json.dumps(chat).encode()),
        (1, json.dumps(completion).encode()),
        (1, b'{"model":"m","prompt":["a","\\ud83d\\ude00"],"stop":"\\n"}'),
        (2, b'{"model":"m","prompt":"a"}'),
        (1, b'{"model":"m","prompt":"x","unknown' + b"x" * 80 + b'":1}'),
        (0, b'{"model":"m","messages":[],"n":1,"n":1}'),
        (1, b'{"model":"\\u0000","prompt":[[1],[2]]}'),
        (1, b"[" * 40 + b"]" * 40),
    ]
    return {f"body-{i:02}": bytes([kind]) + body for i, (kind, body) in enumerate(bodies)}
