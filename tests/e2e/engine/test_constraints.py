"""Answers keep to a schema, regular expression, choice or grammar after a hand-over and a death.

A matcher checks tokens against the constraint. The decode's matcher first takes the token that the
prefill drew. After a death, a matcher first takes the tokens of all earlier legs. Answers must
equal those of plain vLLM, which is vLLM without the mesh and draws each answer in one request.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import jsonschema
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from pdmesh.core.sampling.constraint import Constraint
from pdmesh.core.sampling.logit_shaping import LogitShaping
from pdmesh.core.speculation.proposal_length import Speculation
from pdmesh.engine.base import (
    Failed,
    KvReceived,
    Sampling,
    TicketOpened,
    constraint_failed,
)
from pdmesh.engine.grammars.asked_grammars import AskedGrammar, GrammarKind, grammar_of
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import decode_config, plain_vllm, prefill_config
from tests.e2e.pair import Host, Pair, locally, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
NUM_PROMPTS = 20
NUM_TOKENS = 24
EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
    "additionalProperties": False,
}
TAG = {
    "triggers": ["<f"],
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
}


def calls(begin: str, end: str, style: str) -> str:
    """A structural tag for one or more calls, as vLLM's parsers of tool calls describe them."""
    content = {"type": "json_schema", "json_schema": SCHEMA, "style": style}
    tag = {"type": "tag", "begin": begin, "content": content, "end": end}
    form = {"type": "tags_with_separator", "tags": [tag], "separator": "", "at_least_one": True}
    return json.dumps({"type": "structural_tag", "format": form})


FEATURES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "json": ("json", json.dumps(SCHEMA)),
        "json_object": ("json_object", ""),
        "regex": ("regex", r"[a-z]{3,8}(, [a-z]{3,8}){1,3}\."),
        "choice": ("choice", json.dumps(["perhaps not", "perhaps", "certainly so", "no"])),
        "grammar": ("grammar", 'root ::= ("the " noun " ")+ "end"\nnoun ::= "cat" | "dog" | "cow"'),
        "structural_tag": ("structural_tag", json.dumps(TAG)),
        "calls": ("calls", calls('<call>{"name": "a", "arguments": ', "}</call>", "json")),
        "calls in XML": ("calls", calls("<function=a>\n", "\n</function>", "qwen_xml")),
    }
)


def of_feature(name: str) -> list[Case]:
    rng = random.Random(name)
    return [
        Case(
            tuple(rng.choices(VOCABULARY, k=rng.choice((3, 30, 64, 90)))),
            NUM_TOKENS,
            0.0 if index % 5 == 4 else 1.3,
            2000 + index,
            stop_token_ids=(EOS,),
            form=FEATURES[name],
        )
        for index in range(NUM_PROMPTS)
    ]


CASES = [case for name in FEATURES for case in of_feature(name)]


@pytest.fixture(scope="module")
def expected(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    folder = tmp_path_factory.mktemp("constrained")
    with plain_vllm(
        model_dir,
        CASES,
        folder,
        skip_tokenizer_init=False,
        structured_outputs_config={"backend": "guidance"},
    ) as plain:
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


@pytest.mark.req("S37")
async def test_an_answer_that_continues_elsewhere_is_still_one_of_the_choices(
    fusion: Host, model_dir: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    case = next(case for case in of_feature("choice") if case.temperature == 0)
    tokens = await locally(fusion, case.prompt, case.sampling())
    assert tokenizer.decode(tokens) in json.loads(FEATURES["choice"][1])
    for num in range(1, len(tokens)):
        sampling = replace(case.sampling(), max_tokens=NUM_TOKENS - num, num_drawn=num)
        assert await locally(fusion, (*case.prompt, *tokens[:num]), sampling) == tokens[num:]


@pytest.mark.nightly
def test_each_answer_that_ends_has_its_form(expected: list[list[int]], model_dir: Path) -> None:
    """Otherwise, the equality of answers would prove nothing."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    num_ended = dict.fromkeys(FEATURES, 0)
    for case, tokens in zip(CASES, expected, strict=True):
        name = next(name for name, form in FEATURES.items() if form == case.form)
        if tokens[-1] != EOS:
            continue
        num_ended[name] += 1
        text = tokenizer.decode(tokens)
        if name == "json":
            jsonschema.validate(json.loads(text), SCHEMA)
        elif name == "json_object":
            assert isinstance(json.loads(text), dict)
        elif name == "choice":
            assert text in json.loads(FEATURES[name][1])
    assert num_ended["choice"] == NUM_PROMPTS
    assert min(num_ended[name] for name in ("json", "regex", "grammar")) > 0


@pytest.mark.nightly
@pytest.mark.req("S1", "S49")
async def test_a_pair_draws_what_one_engine_draws(pair: Pair, expected: list[list[int]]) -> None:
    got = await generate_all(pair.generate, CASES, num_concurrent=6)
    assert wrong_features(expected, got) == {}


@pytest.mark.nightly
@pytest.mark.req("S48")
async def test_a_pair_draws_the_same_with_kv_handed_over_per_layer(
    pair: Pair, expected: list[list[int]]
) -> None:
    """The decode starts before token 1 is drawn. Its matcher takes token 1 in the first step."""
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

    As at a gateway, the tokens drawn before the death are part of the new prompt. A `num_drawn`
    below 0 counts from the end of each answer.
    """
    replayed, rest = [], []
    for case, tokens in zip(CASES, expected, strict=True):
        num = num_drawn if num_drawn >= 0 else len(tokens) + num_drawn
        if not 0 < num < len(tokens):
            continue
        prompt = (*case.prompt, *tokens[:num])
        replayed.append(replace(case, prompt=prompt, max_tokens=NUM_TOKENS - num))
        rest.append(tokens[num:])
    return replayed, rest, lambda s: replace(s, num_drawn=NUM_TOKENS - s.max_tokens)


@pytest.mark.nightly
@pytest.mark.req("S37")
@pytest.mark.parametrize("num_drawn", [1, 2, 5, -1])
async def test_an_answer_is_the_same_after_a_death_at_any_token(
    pair: Pair, fusion: Host, expected: list[list[int]], num_drawn: int
) -> None:
    replayed, rest, goes_on = after_death(expected, num_drawn)
    assert len(replayed) > len(CASES) // 2
    got = await generate_all(lambda p, s: pair.generate(p, goes_on(s)), replayed, 6)
    assert differences(rest, got) == []
    got = await generate_all(lambda p, s: locally(fusion, p, goes_on(s)), replayed, 12)
    assert differences(rest, got) == []


@pytest.mark.nightly
@pytest.mark.req("S118")
async def test_a_decode_with_speculation_draws_the_same_greedy_tokens(
    pair: Pair, model_dir: Path, expected: list[list[int]]
) -> None:
    """The matcher must take each proposed token that is accepted, and no other. Only greedy answers
    are compared.
    """
    config = replace(
        decode_config(model_dir),
        instance_id="decode-s",
        max_num_seqs=8,
        speculation=Speculation(4, 0.6, 0.05),
    )
    greedy = [index for index, case in enumerate(CASES) if case.temperature == 0]
    async with running(config) as decode:
        run = Pair(pair.prefill, decode)
        got = await generate_all(run.generate, [CASES[index] for index in greedy], 2)
        assert differences([expected[index] for index in greedy], got) == []


@pytest.mark.nightly
async def test_an_engine_that_forgets_the_drawn_tokens_draws_others(
    fusion: Host, expected: list[list[int]]
) -> None:
    """The negative control: the matcher starts again in the middle of the answer."""
    replayed, rest, _ = after_death(expected, 5)
    got = await generate_all(lambda p, s: locally(fusion, p, s), replayed[:NUM_PROMPTS], 12)
    assert len(differences(rest[:NUM_PROMPTS], got)) > NUM_PROMPTS // 2


ANY_TEXT = Constraint(grammar_of(AskedGrammar(GrammarKind.REGEX, r"(.|\n)*")))
UNLIKE_ALL = LogitShaping(allowed_token_ids=(1,))  # a special token, which has no text
IMPOSSIBLE = {
    "no token that is allowed": Sampling(8, shaping=UNLIKE_ALL, constraint=ANY_TEXT),
    "no grammar": Sampling(8, constraint=Constraint('start: "a" nothing')),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", IMPOSSIBLE)
async def test_a_constraint_that_no_engine_can_keep_fails_without_a_retry(
    pair: Pair, name: str
) -> None:
    """The error is final, so that the gateway does not try one instance after another."""
    prompt, impossible = CASES[0].prompt, IMPOSSIBLE[name]

    async def failure(host: Host, leg: int) -> Failed:
        while not isinstance(output := await host.next_output(leg), Failed):
            assert isinstance(output, TicketOpened | KvReceived), output
        del host.legs[leg]
        return output

    for is_per_layer in (False, True):
        leg = await pair.start_prefill(prompt, impossible, is_per_layer=is_per_layer)
        assert await failure(pair.prefill, leg) == constraint_failed(leg)
    first = await pair.prefilled(prompt, Sampling(8, constraint=ANY_TEXT))
    assert first.ticket is not None
    leg = await pair.start_decode(prompt, first.token, first.ticket, impossible)
    assert await failure(pair.decode, leg) == constraint_failed(leg)
    await pair.prefill.until_idle()
    await pair.decode.until_idle()


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_form_that_is_complete_ends_the_answer_before_its_least_length(
    fusion: Host, temperature: float
) -> None:
    """`min_tokens` forbids the end of the answer, but no other token is allowed after the form."""
    choice = Constraint(grammar_of(AskedGrammar(GrammarKind.CHOICE, json.dumps(["no"]))))
    sampling = Sampling(
        12,
        temperature=temperature,
        seed=5,
        stop_token_ids=frozenset({EOS}),
        shaping=LogitShaping(min_tokens=10),
        constraint=choice,
    )
    assert await locally(fusion, CASES[0].prompt, sampling) == [4607, EOS]
