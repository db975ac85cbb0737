"""Makes tokens of the inputs of a request for vectors: text, or token ids that are checked."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any, Final

from pdmesh.core.kv.prefix.block_hash import token_array
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.http.pooling.schema import MAX_INPUTS, PoolingRequest
from pdmesh.services.gateway.openai.schema import checked_ids
from pdmesh.services.gateway.request.bounds import context_exceeded
from pdmesh.services.gateway.request.spec import ServedModel
from pdmesh.services.gateway.text.tokenizer import TextCut

_IDS_AT_ONCE: Final = 1 << 16  # checked before others have their turn

# Any: what a client sent; each use checks what it reads.
_Anything = Any


def cut_of(request: PoolingRequest, context: int) -> TextCut | None:
    """How its inputs are cut; None: one that is too long is refused. Raises InvalidRequest."""
    asked = request.truncate_prompt_tokens
    if asked is None:
        return None
    if asked == 0:
        raise InvalidRequest("no token of the input is left", field="truncate_prompt_tokens")
    num = context if asked == -1 else asked
    if num > context:
        message = f"truncate_prompt_tokens must be at most the model's context, {context}"
        raise InvalidRequest(message, field="truncate_prompt_tokens")
    return TextCut(num, keeps_end=request.truncation_side == "left")


async def tokens_of(
    given: str | list[_Anything],
    model: ServedModel,
    cut: TextCut | None,
    *,
    add_special_tokens: bool,
    is_lower_case: bool,
    field: str = "input",
) -> tuple[array[int], ...]:
    """The tokens of each input. Raises MeshError."""
    inputs = _inputs(given)
    if isinstance(inputs[0], str):
        texts = [text.lower() for text in inputs] if is_lower_case else inputs
        _check_lengths(texts, model, cut, field)
        found = await model.tokenizer.encode_texts(
            texts, add_special_tokens=add_special_tokens, cut=cut
        )
    else:
        found = await _checked(inputs, model, cut)
    for place, tokens in enumerate(found):
        if not tokens:
            raise InvalidRequest("an input is empty", field=_name(place, given, field))
        if len(tokens) > model.context_length:
            wrong = _name(place, given, field)
            raise context_exceeded(f"{len(tokens)} tokens", model.context_length, wrong)
    return tuple(found)


def _inputs(given: str | list[_Anything]) -> list[_Anything]:
    """One or several: all texts, or all lists of token ids. Raises InvalidRequest."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest("input is empty", field="input")
    if type(given[0]) is int:
        return [given]
    if len(given) > MAX_INPUTS:
        raise InvalidRequest(f"at most {MAX_INPUTS} inputs are allowed", field="input")
    kind = type(given[0])
    if kind not in (str, list) or any(type(each) is not kind for each in given):
        raise _wrong_input()
    return given


def _check_lengths(
    texts: Sequence[str], model: ServedModel, cut: TextCut | None, field: str
) -> None:
    """A text that cannot fit is refused before it is encoded."""
    most = model.context_length * model.tokenizer.max_token_chars
    longest = max(map(len, texts))
    if cut is None and longest > most:
        raise context_exceeded(f"{longest} characters", model.context_length, field)


async def _checked(
    inputs: Sequence[list[_Anything]], model: ServedModel, cut: TextCut | None
) -> list[array[int]]:
    found: list[array[int]] = []
    num_checked = 0
    for ids in inputs:
        if not ids:
            raise InvalidRequest("an input is empty", field="input")
        kept = ids if cut is None else _cut(ids, cut)
        try:
            checked = checked_ids(kept, model.tokenizer.vocab_size, model.context_length, "input")
        except InvalidRequest as exc:
            raise exc if exc.field == "input" else _wrong_input() from None
        found.append(token_array(checked))
        num_checked += len(kept)
        if num_checked >= _IDS_AT_ONCE:
            num_checked = 0
            await asyncio.sleep(0)
    return found


def _cut(ids: list[_Anything], cut: TextCut) -> list[_Anything]:
    return ids[-cut.max_tokens :] if cut.keeps_end else ids[: cut.max_tokens]


def _name(place: int, given: str | list[_Anything], field: str) -> str:
    is_single = isinstance(given, str) or type(given[0]) is int
    return field if is_single else f"{field}[{place}]"


def _wrong_input() -> InvalidRequest:
    message = (
        "input must be a string, token ids, a list of strings, or a list of lists of token ids"
    )
    return InvalidRequest(message, field="input")
