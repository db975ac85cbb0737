"""A thinking budget counts the answer's tokens, whichever engines drew them.

The model does not reason. Tokens that answers often draw serve as the marks of reasoning: one token
as the begin mark, and a pair of tokens as the end mark. Answers must equal those of plain vLLM,
which is vLLM without the mesh.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from pdmesh.core.sampling.logit_shaping import LogitShaping
from pdmesh.core.sampling.thinking_budget import ThinkingBudget, ThinkingMarks
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import plain_vllm, prefill_config
from tests.e2e.pair import Host, Pair, locally, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
NUM_PROMPTS: Final = 24
NUM_TOKENS: Final = 16
MARKS: Final = ThinkingMarks((2003,), (2009, 2010))
FEW: Final = (2001, *MARKS.begin, *MARKS.end, 2015)
BUDGETS: Final = (0, 1, 3, 6, 30)


def budgeted_cases() -> list[Case]:
    """The cases. Half of the prompts end within the reasoning."""
    rng = random.Random("thinking")
    found: list[Case] = []
    for index in range(NUM_PROMPTS):
        prompt = rng.choices(VOCABULARY, k=rng.choice((3, 30, 64, 90)))
        if index % 2:
            prompt += [*MARKS.begin, *rng.choices(VOCABULARY, k=rng.randrange(3))]
        budget = ThinkingBudget(BUDGETS[index % len(BUDGETS)], MARKS)
        shaping = LogitShaping(allowed_token_ids=FEW, thinking_token_budget=budget)
        temperature = 0.0 if index % 6 == 4 else 1.3
        found.append(Case(tuple(prompt), NUM_TOKENS, temperature, 3000 + index, shaping))
    return found


CASES: Final = budgeted_cases()


@pytest.fixture(scope="module")
def expected(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    with plain_vllm(
        model_dir,
        CASES,
        tmp_path_factory.mktemp("thinking"),
        skip_tokenizer_init=False,
        reasoning_config={
            "reasoning_start_str": tokenizer.decode(MARKS.begin),
            "reasoning_end_str": tokenizer.decode(MARKS.end),
        },
    ) as plain:
        return plain.tokens()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fusion(model_dir: Path) -> AsyncIterator[Host]:
    config = replace(prefill_config(model_dir), instance_id="fusion-0", staging_bytes=0)
    async with running(config) as host:
        yield host


def after_death(
    expected: Sequence[list[int]], num_drawn: int
) -> tuple[list[Case], list[list[int]]]:
    """The cases and the rest of the answers after a death.

    As at a gateway, the tokens drawn before the death are part of the new prompt.
    """
    replayed = [
        replace(case, prompt=(*case.prompt, *drawn[:num_drawn]), max_tokens=NUM_TOKENS - num_drawn)
        for case, drawn in zip(CASES, expected, strict=True)
    ]
    return replayed, [drawn[num_drawn:] for drawn in expected]


def within_end_mark(expected: Sequence[list[int]], num_drawn: int) -> int:
    """The number of answers that are cut between the two tokens of their end mark."""
    cuts = (tuple(drawn[num_drawn - 1 : num_drawn + 1]) for drawn in expected)
    return sum(cut == MARKS.end for cut in cuts)


async def test_a_budget_of_none_ends_the_reasoning_at_once(fusion: Host) -> None:
    shaping = LogitShaping(thinking_token_budget=ThinkingBudget(0, MARKS))
    case = Case((*range(2100, 2110), *MARKS.begin), 4, shaping=shaping)
    tokens = await locally(fusion, case.prompt, case.sampling())
    assert tuple(tokens[:2]) == MARKS.end
    going_on = replace(case.sampling(), max_tokens=3, num_drawn=1)
    rest = await locally(fusion, (*case.prompt, tokens[0]), going_on)
    assert rest == tokens[1:]


@pytest.mark.nightly
@pytest.mark.req("S1", "S49")
async def test_a_pair_draws_what_one_engine_draws(pair: Pair, expected: list[list[int]]) -> None:
    assert sum(drawn[:2] == list(MARKS.end) for drawn in expected[1::2]) > 1, "some are forced"
    got = await generate_all(pair.generate, CASES, num_concurrent=6)
    assert differences(expected, got) == []


@pytest.mark.nightly
@pytest.mark.req("S48")
async def test_a_pair_draws_the_same_with_kv_handed_over_per_layer(
    pair: Pair, expected: list[list[int]]
) -> None:
    got = await generate_all(pair.generate_per_layer, CASES, num_concurrent=6)
    assert differences(expected, got) == []


@pytest.mark.nightly
@pytest.mark.req("S72")
async def test_fusion_draws_what_one_engine_draws(fusion: Host, expected: list[list[int]]) -> None:
    got = await generate_all(lambda p, s: locally(fusion, p, s), CASES, 12)
    assert differences(expected, got) == []


@pytest.mark.nightly
@pytest.mark.req("S37")
@pytest.mark.parametrize("num_drawn", [1, 2, 5, NUM_TOKENS - 2])
async def test_an_answer_is_the_same_after_a_death_at_any_token(
    pair: Pair, fusion: Host, expected: list[list[int]], num_drawn: int
) -> None:
    assert num_drawn != 1 or within_end_mark(expected, 1) > 0
    replayed, rest = after_death(expected, num_drawn)
    got = await generate_all(
        lambda p, s: pair.generate(p, replace(s, num_drawn=num_drawn)), replayed, 6
    )
    assert differences(rest, got) == []
    got = await generate_all(
        lambda p, s: locally(fusion, p, replace(s, num_drawn=num_drawn)), replayed, 12
    )
    assert differences(rest, got) == []


@pytest.mark.nightly
async def test_an_engine_that_forgets_the_drawn_tokens_draws_others(
    fusion: Host, expected: list[list[int]]
) -> None:
    """The negative control: the budget of an answer starts again."""
    replayed, rest = after_death(expected, 5)
    got = await generate_all(lambda p, s: locally(fusion, p, s), replayed, 12)
    assert differences(rest, got) != []
