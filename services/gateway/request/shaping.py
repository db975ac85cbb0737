"""Makes the logit shaping of a call from the client's settings and the model's defaults.

Logit shaping is every setting that changes the logits or selects among tokens before one is drawn,
except temperature and `top_p`. Examples are penalties, `top_k` and biases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pdmesh.core.sampling.logit_shaping import (
    MAX_BAD_WORDS,
    MAX_LOGPROB_IDS,
    UNSHAPED,
    LogitShaping,
)
from pdmesh.core.sampling.thinking_budget import ThinkingBudget
from pdmesh.errors import InvalidRequest, shortened
from pdmesh.services.gateway.request.bounds import as_sent
from pdmesh.services.gateway.text.tokenizer import Tokenizer

MAX_WORDS: Final = 128
MAX_WORD_CHARS: Final = 128
MAX_BIAS: Final = 100.0
MAX_STOP_IDS: Final = 64


class AskedShaping(msgspec.Struct, frozen=True):
    """The fields of vLLM's API.

    For a field that is None, the model's default applies. If the model has no default, the field
    shapes nothing. `top_k` -1 or 0 allows all tokens.
    """

    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    thinking_token_budget: ThinkingBudget | None = None


NOTHING_ASKED: Final = AskedShaping()


async def shaping_of(
    asked: AskedShaping, tokenizer: Tokenizer, max_tokens: int | None
) -> LogitShaping:
    """The shaping that the client asks for. Raises InvalidRequest with the field."""
    defaults = tokenizer.defaults
    if asked == NOTHING_ASKED and not defaults.shapes_logits:
        return UNSHAPED
    shaping = LogitShaping(
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        repetition_penalty=defaults.repetition_penalty
        if asked.repetition_penalty is None
        else as_sent(asked.repetition_penalty),
        top_k=_top_k(defaults.top_k if asked.top_k is None else asked.top_k),
        min_p=defaults.min_p if asked.min_p is None else asked.min_p,
        min_tokens=asked.min_tokens,
        logit_bias=_biases(asked.logit_bias or {}),
        bad_words=await _bad_words(asked.bad_words or (), tokenizer),
        allowed_token_ids=_allowed(asked.allowed_token_ids),
        thinking_token_budget=asked.thinking_token_budget,
    )
    if shaping == UNSHAPED:
        return UNSHAPED
    shaping.check(tokenizer.vocab_size, max_tokens)
    return shaping


def biases_by_id(asked: Mapping[str, float]) -> dict[int, float]:
    """Convert the keys, which are strings in JSON, to token ids. Raises InvalidRequest."""
    found: dict[int, float] = {}
    for name, bias in asked.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            message = f"the keys of logit_bias are token ids, but {shortened(name)} is not one"
            raise InvalidRequest(message, field="logit_bias")
        found[int(name)] = bias
    return found


def stop_ids_of(asked: Sequence[int] | None, vocab_size: int) -> frozenset[int]:
    """Raises InvalidRequest."""
    if not asked:
        return frozenset()
    if len(asked) > MAX_STOP_IDS:
        raise InvalidRequest(
            f"at most {MAX_STOP_IDS} stop tokens are allowed", field="stop_token_ids"
        )
    if not 0 <= min(asked) <= max(asked) < vocab_size:
        message = f"stop_token_ids names a token id outside 0 to {vocab_size - 1}"
        raise InvalidRequest(message, field="stop_token_ids")
    return frozenset(asked)


def logprob_ids_of(
    asked: Sequence[int] | None, vocab_size: int, num_logprobs: int | None
) -> tuple[int, ...]:
    """Raises InvalidRequest with the field."""
    if not asked:
        return ()
    if num_logprobs is None:
        message = "logprob_token_ids needs log probabilities to be asked for"
        raise InvalidRequest(message, field="logprob_token_ids")
    if len(asked) > MAX_LOGPROB_IDS:
        message = f"logprob_token_ids has more than {MAX_LOGPROB_IDS} entries"
        raise InvalidRequest(message, field="logprob_token_ids")
    if not 0 <= min(asked) <= max(asked) < vocab_size:
        message = f"logprob_token_ids names a token id outside 0 to {vocab_size - 1}"
        raise InvalidRequest(message, field="logprob_token_ids")
    return tuple(asked)


def _top_k(asked: int) -> int:
    if asked < -1:
        raise InvalidRequest("top_k must be -1, 0 or a number of tokens", field="top_k")
    return max(0, asked)


def _biases(asked: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    if any(math.isnan(bias) for bias in asked.values()):
        raise InvalidRequest("logit_bias contains NaN", field="logit_bias")
    return tuple(
        (token_id, min(max(bias, -MAX_BIAS), MAX_BIAS)) for token_id, bias in sorted(asked.items())
    )


def _allowed(asked: Sequence[int] | None) -> tuple[int, ...]:
    if asked is None:
        return ()
    if not asked:
        raise InvalidRequest("allowed_token_ids allows no token", field="allowed_token_ids")
    return tuple(dict.fromkeys(asked))


async def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token ids of each bad word, exactly as vLLM makes them.

    A word is encoded twice, at the beginning of a text and after a space. The second encoding is
    added only if it has as many tokens as the first one and begins with another token.
    """
    if not words:
        return ()
    if len(words) > MAX_WORDS:
        raise InvalidRequest(f"at most {MAX_WORDS} bad words are allowed", field="bad_words")
    if any(not 0 < len(word) <= MAX_WORD_CHARS for word in words):
        message = f"a bad word must have 1 to {MAX_WORD_CHARS} characters"
        raise InvalidRequest(message, field="bad_words")
    bare = [word.lstrip() for word in words]
    encoded = await tokenizer.encode_words([*bare, *(f" {word}" for word in bare)])
    found: list[tuple[int, ...]] = []
    for first, spaced in zip(encoded[: len(bare)], encoded[len(bare) :], strict=True):
        if not first:
            raise InvalidRequest("a bad word must have at least one token", field="bad_words")
        found.append(tuple(first))
        if spaced and spaced[0] != first[0] and len(spaced) == len(first):
            found.append(tuple(spaced))
    return tuple(found[:MAX_BAD_WORDS])
