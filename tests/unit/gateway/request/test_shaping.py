"""Tests how a client's parameters and a model's defaults shape the logits of an answer."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdmesh.core.sampling.logit_shaping import UNSHAPED
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.request.shaping import (
    NOTHING_ASKED,
    AskedShaping,
    biases_by_id,
    shaping_of,
    stop_ids_of,
)
from pdmesh.services.gateway.text.tokenizer import Tokenizer
from tests.fakes.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tiny_model(tmp_path_factory.mktemp("tiny")), max_chars=10_000)


async def test_a_request_that_asks_for_nothing_is_unshaped(tokenizer: Tokenizer) -> None:
    assert await shaping_of(NOTHING_ASKED, tokenizer, None) is UNSHAPED
    neutral = AskedShaping(0.0, 0.0, 1.0, -1, 0.0, 0, {}, [], None)
    assert await shaping_of(neutral, tokenizer, 5) is UNSHAPED


async def test_logit_biases_are_clamped_and_sorted(tokenizer: Tokenizer) -> None:
    asked = AskedShaping(logit_bias=biases_by_id({"7": 1000.0, "3": -1000.0, "5": 1.5}))
    shaping = await shaping_of(asked, tokenizer, None)
    assert shaping.logit_bias == ((3, -100.0), (5, 1.5), (7, 100.0))


async def test_bad_words_are_forbidden_at_a_beginning_and_after_a_space(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad word is also forbidden after a space if the space changes its first token but not the
    number of its tokens.
    """
    ids = {"ab": [1], " ab": [2], "c": [3], " c": [9, 3], "d": [4], " d": [4]}

    async def encode_words(words: Sequence[str]) -> list[array[int]]:
        return [array("I", ids[word]) for word in words]

    monkeypatch.setattr(tokenizer, "encode_words", encode_words)
    shaping = await shaping_of(AskedShaping(bad_words=["ab", "  c", "d"]), tokenizer, None)
    assert shaping.bad_words == ((1,), (2,), (3,), (4,))


async def test_words_are_encoded_without_special_tokens(tokenizer: Tokenizer) -> None:
    shaping = await shaping_of(AskedShaping(bad_words=["ab"]), tokenizer, None)
    assert shaping.bad_words[0] == tuple(await tokenizer.encode("ab", add_special_tokens=False))


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (AskedShaping(top_k=-2), "top_k"),
        (AskedShaping(min_p=2.0), "min_p"),
        (AskedShaping(repetition_penalty=0.0), "repetition_penalty"),
        (AskedShaping(min_tokens=6), "min_tokens"),
        (AskedShaping(allowed_token_ids=[]), "allowed_token_ids"),
        (AskedShaping(allowed_token_ids=[1 << 20]), "allowed_token_ids"),
        (AskedShaping(logit_bias={1 << 20: 1.0}), "logit_bias"),
        (AskedShaping(logit_bias={1: float("nan")}), "logit_bias"),
        (AskedShaping(bad_words=[""]), "bad_words"),
        (AskedShaping(bad_words=["x" * 129]), "bad_words"),
        (AskedShaping(bad_words=["x"] * 129), "bad_words"),
    ],
)
async def test_the_refusal_of_an_impossible_value_names_its_field(
    tokenizer: Tokenizer, asked: AskedShaping, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await shaping_of(asked, tokenizer, 5)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["", "-1", "1.0", "x", "\u0663", "1" * 11])
def test_a_bias_for_something_other_than_a_token_id_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        biases_by_id({name: 1.0})
    assert caught.value.field == "logit_bias"


def test_stop_tokens_must_be_few_and_in_the_vocabulary() -> None:
    assert stop_ids_of([3, 4, 3], 5) == {3, 4}
    assert stop_ids_of(None, 5) == frozenset()
    for ids in ([5], [-1], list(range(65))):
        with pytest.raises(InvalidRequest):
            stop_ids_of(ids, 5 if len(ids) == 1 else 100)


async def test_the_defaults_of_a_model_apply_unless_the_request_overrides_them(
    tmp_path: Path,
) -> None:
    write_tiny_model(tmp_path)
    said: dict[str, Any] = {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1,
        "max_new_tokens": 77, "min_p": "no number", "do_sample": True,
    }  # fmt: skip
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said if path.exists() else said))
    tokenizer = Tokenizer.load(tmp_path, max_chars=100)
    defaults = tokenizer.defaults
    assert (defaults.temperature, defaults.top_p, defaults.max_tokens) == (0.6, 0.95, 77)
    shaping = await shaping_of(NOTHING_ASKED, tokenizer, None)
    assert (shaping.top_k, shaping.repetition_penalty, shaping.min_p) == (20, 1.1, 0.0)
    asked = AskedShaping(repetition_penalty=1.0, top_k=0)
    assert await shaping_of(asked, tokenizer, None) is UNSHAPED
    without = Tokenizer.load(tmp_path, max_chars=100, has_defaults=False)
    assert await shaping_of(NOTHING_ASKED, without, None) is UNSHAPED
