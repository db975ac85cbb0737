"""`pdmesh pins`: manages pins, which keep a prefix's KV from eviction.

A prefix is the beginning of prompts, for example a tenant's system prompt. A gateway turns the text
into tokens, as for a request. The master turns the tokens into block names. The text itself is
stored nowhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from contextlib import closing
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any, Final

from pdmesh.cli.commands.chat import (
    answers_from,
    base_path,
    connection_to,
    error_text,
    url_of_mesh,
)
from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.leader import leader_of
from pdmesh.cli.texts import text_of
from pdmesh.cli.view.output import show
from pdmesh.cli.view.table import table
from pdmesh.core.kv.prefix.block_hash import tokens_to_bytes
from pdmesh.v1 import admin_service_pb2 as pb

_MAX_BODY_BYTES: Final = 64 << 20
# Two user messages without a common beginning. Two conversations with the same system prompt and
# these messages have only the pinned prefix in common: the system prompt and the template's part
# before the message.
_USERS: Final = ("0", "A")
Command = Callable[[argparse.Namespace], Coroutine[None, None, int]]


def run(options: argparse.Namespace) -> int:
    return asyncio.run(_ACTIONS[options.action](options))


async def _add(options: argparse.Namespace) -> int:
    tokens = await asyncio.to_thread(_tokens, options)
    request = pb.AddPinRequest(
        pin_id=options.pin,
        model=options.model,
        tenant=options.tenant,
        cache_salt=options.cache_salt,
        scenario=options.scenario,
        prefix_token_ids=tokens_to_bytes(tokens),
        ttl_s=options.ttl,
        reason=options.reason,
    )
    response = await leader_of(options).add_pin(request)
    show(options, response, lambda: _added_text(response.pin))
    return 0


async def _list(options: argparse.Namespace) -> int:
    response = await leader_of(options).pins()
    show(options, response, lambda: pins_text(response))
    return 0


async def _remove(options: argparse.Namespace) -> int:
    response = await leader_of(options).remove_pin(options.pin)
    show(options, response, lambda: f"{options.pin} is no longer pinned")
    return 0


_ACTIONS: Final[Mapping[str, Command]] = {"add": _add, "list": _list, "remove": _remove}


def _added_text(pin: pb.PinState) -> str:
    num_blocks = max((each.num_blocks for each in pin.coverage), default=0)
    return f"{pin.pin_id}: {pin.num_tokens} tokens, {num_blocks} blocks, until {_when(pin.until)}"


def pins_text(pins: pb.ListPinsResponse) -> str:
    """A table with a row for each pin and each kind of KV (fingerprint) that the pin covers."""
    rows = [
        (
            pin.pin_id, pin.tenant, pin.scenario or "all", pin.model, str(pin.num_tokens),
            _held(each), _when(pin.until), pin.reason,
        )
        for pin in pins.pins
        for each in pin.coverage
    ]  # fmt: skip
    columns = ("PIN", "TENANT", "SCENARIO", "MODEL", "TOKENS", "IN HOST POOLS", "UNTIL", "REASON")
    return table(columns, rows)


def _held(coverage: pb.PinCoverage) -> str:
    if not coverage.num_blocks:
        return f"not under {coverage.model_fingerprint}: add it again"
    held = [f"{h.instance_id} {h.num_blocks}/{coverage.num_blocks}" for h in coverage.holders]
    return ", ".join(held) or f"no instance yet, of {coverage.num_blocks} blocks"


def _when(at: Any) -> str:  # `at` is a protobuf Timestamp
    return datetime.fromtimestamp(at.ToMicroseconds() / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


# -- tokens ---------------------------------------------------------------------------------------


def _tokens(options: argparse.Namespace) -> list[int]:
    """The token ids of the prefix, which the user gives in one of three forms.

    Raises CommandFailed.
    """
    if options.token_ids is not None:
        words = text_of(options.token_ids).replace(",", " ").split()
        if wrong := next((w for w in words if not w.isdecimal() or int(w[:20]) >= 2**32), None):
            raise CommandFailed(f"{options.token_ids}: {wrong[:40]} is not a token id")
        return [int(word) for word in words]
    url = options.url or url_of_mesh(options)
    if options.text is not None:
        return _tokenized(url, options, {"prompt": text_of(options.text)})
    system = text_of(options.system)
    one, other = (_tokenized(url, options, {"messages": _chat(system, user)}) for user in _USERS)
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [token for token, _ in shared]


def _chat(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _tokenized(url: str, options: argparse.Namespace, what: dict[str, object]) -> list[int]:
    """The tokens of a text, from the gateway at `url`. Raises CommandFailed."""
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    body = json.dumps({"model": options.model or "default"} | what)
    with answers_from(url), closing(connection_to(url)) as connection:
        connection.request("POST", f"{base_path(url)}/tokenize", body, headers)
        response = connection.getresponse()
        answer = response.read(_MAX_BODY_BYTES)
        if response.status != 200:
            raise CommandFailed(error_text(response.status, answer))
        tokens: list[int] = json.loads(answer)["tokens"]
        return tokens
