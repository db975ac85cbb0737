"""The prompts of the equality tests, and functions that compare answers.

A test passes a function of type `Generate`, which turns prompt ids and `Sampling` into token ids.
The function may use two engines in memory, or the whole mesh over `/v1/completions`. Its answers
are compared with the answers of plain vLLM, which is vLLM without the mesh.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from pdmesh.core.sampling.constraint import Constraint
from pdmesh.core.sampling.logit_shaping import UNSHAPED, LogitShaping
from pdmesh.engine.base import Sampling
from pdmesh.engine.grammars.asked_grammars import AskedGrammar, GrammarKind, grammar_of

Generate = Callable[[Sequence[int], Sampling], Awaitable[list[int]]]
VOCABULARY = range(1000, 40000)  # ordinary words of SmolLM2's tokenizer, without special tokens
NUM_CASES = 208


@dataclass(frozen=True, slots=True)
class Case:
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    shaping: LogitShaping = UNSHAPED
    stop_token_ids: tuple[int, ...] = ()
    adapter: str = ""  # the folder of a LoRA adapter
    logprob_token_ids: tuple[int, ...] = ()
    form: tuple[str, str] | None = None  # a GrammarKind, and the text of the grammar
    images: tuple[str, ...] = ()  # files of images, with one placeholder in the prompt for each

    @property
    def constraint(self) -> Constraint | None:
        if self.form is None:
            return None
        return Constraint(grammar_of(AskedGrammar(GrammarKind(self.form[0]), self.form[1])))

    def sampling(self, stop_token_ids: frozenset[int] = frozenset()) -> Sampling:
        return Sampling(
            self.max_tokens,
            self.temperature,
            seed=self.seed,
            stop_token_ids=stop_token_ids | frozenset(self.stop_token_ids),
            num_logprobs=0 if self.logprob_token_ids else None,
            logprob_token_ids=self.logprob_token_ids,
            shaping=self.shaping,
            constraint=self.constraint,
        )


def cases(block_size: int, seed: int = 7) -> list[Case]:
    """Prompts of all lengths around block boundaries.

    There are also long prompts, many short prompts, and prompts that share a prefix.
    """
    rng = random.Random(seed)
    edges = [1, 2, 3] + [k * block_size + d for k in (1, 2, 3, 4) for d in (-1, 0, 1)]
    edges += [8 * block_size + d for d in (-1, 0, 1)] + [600]
    lengths = edges + [rng.randint(1, 160) for _ in range(NUM_CASES - 2 * len(edges))] + edges
    shared = tuple(rng.choices(VOCABULARY, k=700))
    result: list[Case] = []
    for index, length in enumerate(lengths):
        own = tuple(rng.choices(VOCABULARY, k=length))
        num_shared = length // 2 if index >= len(lengths) - len(edges) else 0
        prompt = shared[:num_shared] + own[num_shared:]
        result.append(Case(prompt, 1 if index % 13 == 5 else rng.choice((2, 3, 5, 8))))
    return result


async def generate_all(
    generate: Generate,
    todo: Sequence[Case],
    num_concurrent: int,
    stop_token_ids: Sequence[frozenset[int]] | None = None,
) -> list[list[int]]:
    """The answers in the order of `todo`. At most `num_concurrent` requests run at a time."""
    slots = asyncio.Semaphore(num_concurrent)

    async def one(index: int) -> list[int]:
        stops = stop_token_ids[index] if stop_token_ids else frozenset[int]()
        async with slots:
            return await generate(todo[index].prompt, todo[index].sampling(stops))

    return list(await asyncio.gather(*(one(i) for i in range(len(todo)))))


def differences(expected: Sequence[list[int]], got: Sequence[list[int]]) -> list[int]:
    """The indexes of the outputs that differ."""
    assert len(expected) == len(got)
    return [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]


def until_stop(tokens: Sequence[int], stops: frozenset[int]) -> list[int]:
    """`tokens` up to and including the first token of `stops`."""
    for index, token in enumerate(tokens):
        if token in stops:
            return list(tokens[: index + 1])
    return list(tokens)


def long_cases(num: int = 8, seed: int = 11) -> list[Case]:
    """Short prompts whose answers fill several more blocks."""
    rng = random.Random(seed)
    return [Case(tuple(rng.choices(VOCABULARY, k=60)), 96) for _ in range(num)]


def longest(todo: Sequence[Case]) -> tuple[int, ...]:
    """The longest prompt, which has 600 tokens: nine whole blocks of 64, and a rest."""
    return max((case.prompt for case in todo), key=len)
