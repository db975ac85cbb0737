"""Makes the tokens of the inputs for vectors: encodes text, and checks token ids."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdmesh.core.kv.prefix.block_hash import token_array
from pdmesh.core.pooling.batches import MAX_CALL_TOKENS
from pdmesh.core.pooling.truncation import SpecialTokens, TextCut, one_text
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.http.pooling.schema import MAX_INPUTS, PoolingRequest
from pdmesh.services.gateway.openai.schema import checked_ids
from pdmesh.services.gateway.request.bounds import context_exceeded
from pdmesh.services.gateway.request.spec import ServedModel

_IDS_AT_ONCE: Final = 1 << 16  # token ids to check before other requests get the event loop

# The type is Any because a client may send anything. Each use checks the value.
_Anything = Any


@dataclass(frozen=True, slots=True)
class Reading:
    """How inputs become tokens. Without `cut`, an input that is too long is refused."""

    cut: TextCut | None
    add_special_tokens: bool = True
    is_lower_case: bool = False


def cut_of(request: PoolingRequest, context: int) -> TextCut | None:
    """How inputs are cut. None means that they are not cut. Raises InvalidRequest."""
    asked = request.truncate_prompt_tokens
    if asked is None:
        return None
    if asked == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens is 0, which leaves no token", field="truncate_prompt_tokens"
        )
    num = context if asked == -1 else asked
    if num > context:
        message = f"truncate_prompt_tokens must be at most the model's context, {context}"
        raise InvalidRequest(message, field="truncate_prompt_tokens")
    return TextCut(num, request.truncation_side)


async def tokens_of(
    given: str | list[_Anything], model: ServedModel, reading: Reading, field: str = "input"
) -> tuple[array[int], ...]:
    """The tokens of each input. Raises MeshError."""
    inputs = _inputs(given, field)
    if isinstance(inputs[0], str):
        found = await _encoded(inputs, model, reading, field)
    else:
        found = await _checked(inputs, model, reading.cut, field)
    for place, tokens in enumerate(found):
        if not tokens:
            raise InvalidRequest("an input is empty", field=_name(place, given, field))
        if len(tokens) > model.context_length:
            wrong = _name(place, given, field)
            raise context_exceeded(f"{len(tokens)} tokens", model.context_length, wrong)
    check_total(sum(map(len, found)), field)
    return tuple(found)


def check_total(num_tokens: int, field: str) -> None:
    """Raises InvalidRequest."""
    if num_tokens > MAX_CALL_TOKENS:
        message = f"the inputs have {num_tokens} tokens together, and may have {MAX_CALL_TOKENS}"
        raise InvalidRequest(f"{message}: send fewer at once", field=field)


async def _encoded(
    texts: Sequence[str], model: ServedModel, reading: Reading, field: str
) -> list[array[int]]:
    bulk, cut, context = model.tokenizer.bulk, reading.cut, model.context_length
    longest = max(map(len, texts))
    if cut is None and longest > context * bulk.max_token_chars:
        raise context_exceeded(f"{longest} characters", context, field)  # too long in any encoding
    bounded = [bulk.bounded(text, context, cut) for text in texts]
    contents = await bulk.contents(bounded, cut=cut, is_lower_case=reading.is_lower_case)
    special = bulk.around_one if reading.add_special_tokens else SpecialTokens()
    return [one_text(content, special, cut) for content in contents]


def _inputs(given: str | list[_Anything], field: str) -> list[_Anything]:
    """The inputs as a list of texts, or as a list of lists of token ids. Raises InvalidRequest."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest("input is empty", field=field)
    if type(given[0]) is int:
        return [given]
    if len(given) > MAX_INPUTS:
        raise InvalidRequest(f"at most {MAX_INPUTS} inputs are allowed", field=field)
    kind = type(given[0])
    if kind not in (str, list) or any(type(each) is not kind for each in given):
        raise _wrong_input(field)
    return given


async def _checked(
    inputs: Sequence[list[_Anything]], model: ServedModel, cut: TextCut | None, field: str
) -> list[array[int]]:
    found: list[array[int]] = []
    num_checked = 0
    for ids in inputs:
        if not ids:
            raise InvalidRequest("an input is empty", field=field)
        kept = ids if cut is None else _cut(ids, cut)
        try:
            checked = checked_ids(kept, model.tokenizer.vocab_size, model.context_length, field)
        except InvalidRequest as exc:
            raise exc if exc.field == field else _wrong_input(field) from None
        found.append(token_array(checked))
        num_checked += len(kept)
        if num_checked >= _IDS_AT_ONCE:
            num_checked = 0
            await asyncio.sleep(0)
    return found


def _cut(ids: list[_Anything], cut: TextCut) -> list[_Anything]:
    return ids[-cut.max_tokens :] if cut.side == "left" else ids[: cut.max_tokens]


def _name(place: int, given: str | list[_Anything], field: str) -> str:
    is_single = isinstance(given, str) or type(given[0]) is int
    return field if is_single else f"{field}[{place}]"


def _wrong_input(field: str) -> InvalidRequest:
    message = (
        "input must be a string, token ids, a list of strings, or a list of lists of token ids"
    )
    return InvalidRequest(message, field=field)
