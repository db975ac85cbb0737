"""The bounds on a request's fields that change logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdmesh.core.sampling.logit_shaping import UNSHAPED, LogitShaping
from pdmesh.errors import InvalidRequest

VOCABULARY = 100
NAN = float("nan")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.1),
        ("presence_penalty", NAN),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", NAN),
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("top_k", -1),
        ("min_tokens", 9),
        ("logit_bias", ((VOCABULARY, 1.0),)),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, NAN),)),
        ("logit_bias", tuple((1, 0.0) for _ in range(1025))),
        ("bad_words", ((),)),
        ("bad_words", ((1, VOCABULARY),)),
        ("allowed_token_ids", (0, VOCABULARY)),
        ("allowed_token_ids", (1,) * 65_537),
    ],
)
def test_the_refusal_of_a_value_out_of_bounds_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        replace(UNSHAPED, **{field: value}).check(VOCABULARY, max_tokens=8)
    assert caught.value.field == field


def test_values_at_their_bounds_are_accepted() -> None:
    LogitShaping(-2, 2, 100, 0, 1, 8, ((99, -100.0),), ((0, 99),), (0, 99)).check(VOCABULARY, 8)
    UNSHAPED.check(VOCABULARY, 1)
