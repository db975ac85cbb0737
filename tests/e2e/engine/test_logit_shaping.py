"""vLLM's sampling parameters stay in effect after a hand-over and a death.

Some parameters count the tokens of an answer. These must also count tokens that another engine
drew. Answers must equal those of plain vLLM, which is vLLM without the mesh and draws each answer
in one request.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import pytest_asyncio

from pdmesh.core.sampling.logit_shaping import LogitShaping
from pdmesh.engine.base import Sampling
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import plain_vllm, prefill_config
from tests.e2e.pair import Host, Pair, locally, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
NUM_PROMPTS = 20
NUM_TOKENS = 12
# These tokens are so few that answers repeat some of them.
FEW = tuple(range(2000, 2024))
# Words of two tokens. Two legs may draw the first and the second token.
PAIRS = tuple((first, second) for first in FEW for second in FEW if first != second)
FEATURES: Mapping[str, LogitShaping] = MappingProxyType(
    {
        "allowed_token_ids": LogitShaping(allowed_token_ids=FEW),
        "presence_penalty": LogitShaping(allowed_token_ids=FEW, presence_penalty=2.0),
        "frequency_penalty": LogitShaping(allowed_token_ids=FEW, frequency_penalty=1.5),
        "repetition_penalty": LogitShaping(allowed_token_ids=FEW, repetition_penalty=1.7),
        "logit_bias": LogitShaping(logit_bias=tuple((token, 9.0) for token in FEW)),
        "bad_words": LogitShaping(allowed_token_ids=FEW, bad_words=PAIRS[:400]),
        "top_k": LogitShaping(top_k=5),
        "min_p": LogitShaping(min_p=0.2),
        "min_tokens": LogitShaping(allowed_token_ids=FEW, min_tokens=7),
        "all": LogitShaping(1.0, -0.5, 1.2, 50, 0.01, 4, ((FEW[0], 3.0),), PAIRS[:40]),
    }
)
STOPPED = frozenset({"min_tokens", "all"})  # features whose cases have stop tokens


def of_feature(name: str) -> list[Case]:
    rng = random.Random(name)
    return [
        Case(
            tuple(rng.choices(VOCABULARY, k=rng.choice((3, 30, 64, 90)))),
            NUM_TOKENS,
            0.0 if index % 5 == 4 else 1.3,
            1000 + index,
            FEATURES[name],
            FEW[:12] if name in STOPPED else (),
        )
        for index in range(NUM_PROMPTS)
    ]


CASES = [case for name in FEATURES for case in of_feature(name)]


@pytest.fixture(scope="module")
def expected(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with plain_vllm(model_dir, CASES, tmp_path_factory.mktemp("shaped")) as plain:
        return plain.tokens()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fusion(model_dir: Path) -> AsyncIterator[Host]:
    config = replace(prefill_config(model_dir), instance_id="fusion-0", staging_bytes=0)
    async with running(config) as host:
        yield host


def wrong_features(expected: Sequence[list[int]], got: Sequence[list[int]]) -> dict[str, list[int]]:
    """The indexes of answers that differ, by feature."""
    wrong: dict[str, list[int]] = {}
    names = list(FEATURES)
    for index in differences(expected, got):
        wrong.setdefault(names[index // NUM_PROMPTS], []).append(index % NUM_PROMPTS)
    return wrong


def test_each_feature_changes_answers(expected: list[list[int]]) -> None:
    """Otherwise, the equality of answers would prove nothing."""
    by_name = {
        name: expected[at * NUM_PROMPTS : (at + 1) * NUM_PROMPTS]
        for at, name in enumerate(FEATURES)
    }
    assert all(set(answer) <= set(FEW) for answer in by_name["allowed_token_ids"])
    num_distinct = {name: sum(len(set(a)) for a in answers) for name, answers in by_name.items()}
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert num_distinct[name] > num_distinct["allowed_token_ids"]
    forbidden = set(PAIRS[:400])
    assert not any(forbidden & set(itertools.pairwise(a)) for a in by_name["bad_words"])
    lengths = [len(answer) for answer in by_name["min_tokens"]]
    assert min(lengths) == 8, "token 8 is the first that may end an answer, and it does"
    assert any(forbidden & set(itertools.pairwise(a)) for a in by_name["allowed_token_ids"])


@pytest.mark.req("S1", "S49")
async def test_a_pair_draws_what_one_engine_draws(pair: Pair, expected: list[list[int]]) -> None:
    got = await generate_all(pair.generate, CASES, num_concurrent=6)
    assert wrong_features(expected, got) == {}


@pytest.mark.nightly
@pytest.mark.req("S48")
async def test_a_pair_draws_the_same_with_kv_handed_over_per_layer(
    pair: Pair, expected: list[list[int]]
) -> None:
    got = await generate_all(pair.generate_per_layer, CASES, num_concurrent=6)
    assert wrong_features(expected, got) == {}


@pytest.mark.nightly
@pytest.mark.req("S72")
async def test_fusion_draws_what_one_engine_draws(fusion: Host, expected: list[list[int]]) -> None:
    got = await generate_all(lambda p, s: locally(fusion, p, s), CASES, 12)
    assert wrong_features(expected, got) == {}


def after_death(
    expected: Sequence[list[int]], num_drawn: int
) -> tuple[list[Case], list[list[int]], Callable[[Sampling], Sampling]]:
    """The cases and the rest of the answers after a death.

    As at a gateway, the tokens drawn before the death are part of the new prompt.
    """
    longer = [index for index, tokens in enumerate(expected) if len(tokens) > num_drawn]
    replayed = [
        replace(
            CASES[index],
            prompt=(*CASES[index].prompt, *expected[index][:num_drawn]),
            max_tokens=NUM_TOKENS - num_drawn,
        )
        for index in longer
    ]
    rest = [expected[index][num_drawn:] for index in longer]
    return replayed, rest, lambda sampling: replace(sampling, num_drawn=num_drawn)


@pytest.mark.req("S37")
@pytest.mark.nightly
@pytest.mark.parametrize("num_drawn", [1, 2, 5, NUM_TOKENS - 2])
async def test_an_answer_is_the_same_after_a_death_at_any_token(
    pair: Pair, fusion: Host, expected: list[list[int]], num_drawn: int
) -> None:
    replayed, rest, goes_on = after_death(expected, num_drawn)
    got = await generate_all(lambda p, s: pair.generate(p, goes_on(s)), replayed, 6)
    assert differences(rest, got) == []
    got = await generate_all(lambda p, s: locally(fusion, p, goes_on(s)), replayed, 12)
    assert differences(rest, got) == []


@pytest.mark.nightly
async def test_an_engine_that_forgets_the_drawn_tokens_draws_others(
    fusion: Host, expected: list[list[int]]
) -> None:
    """The negative control: the engine takes the tokens that others drew for part of the prompt."""
    replayed, rest, _ = after_death(expected, 5)
    penalised = slice(NUM_PROMPTS, 3 * NUM_PROMPTS)
    got = await generate_all(lambda p, s: locally(fusion, p, s), replayed[penalised], 12)
    assert len(differences(rest[penalised], got)) > NUM_PROMPTS
