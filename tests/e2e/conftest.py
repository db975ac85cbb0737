"""Fixtures of the e2e tests: engines, and the answers of plain vLLM, which is vLLM without the
mesh.

Each fixture starts once for all tests. Answers are compared only up to the first near-tie. A
near-tie is a step in which two tokens are almost equally likely, so that rounding may decide.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdmesh.core.instance.async_scheduling import AsyncScheduling
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.models import smollm2
from tests.e2e.cases import Case, cases, long_cases
from tests.e2e.pair import Pair, running
from tests.e2e.plain_vllm import main as plain_vllm_main
from tests.e2e.preloaded import preloaded, run_main

BLOCK_SIZE = 64
DTYPE = "float32"
# The engines read this variable as the services do. So the whole suite can also run with
# asynchronous scheduling.
ASYNC_SCHEDULING = AsyncScheduling(os.environ.get("PDMESH_ASYNC_SCHEDULING", "auto"))
NEAR_TIE = 5e-4  # the difference of two log probabilities, which rounding changes by about 1e-5


@dataclass(frozen=True, slots=True)
class Reference:
    """The tokens that plain vLLM draws for the cases. Plain vLLM is started for this run."""

    cases: list[Case]
    tokens: list[list[int]]
    long_cases: list[Case]
    long_tokens: list[list[int]]


@dataclass(frozen=True, slots=True)
class Plain:
    process: BaseProcess
    folder: Path

    def tokens(self) -> list[list[int]]:
        """The drawn tokens, in the order of the cases. This call waits until vLLM has finished."""
        tokens: list[list[int]] = self._answers()["tokens"]
        return tokens

    def margins(self) -> list[list[float]]:
        """By how much each drawn token is likelier than the second likeliest, in log
        probability.
        """
        margins: list[list[float]] = self._answers()["margins"]
        return margins

    def told(self) -> list[list[list[tuple[int, float]]]]:
        """For each token of each answer, log probabilities by token id."""
        found = self._answers()["told"]
        return [[[(i, value) for i, value in step] for step in answer] for answer in found]

    def decided(self, asked: Sequence[Case]) -> tuple[list[Case], list[list[int]]]:
        """The cases and the drawn tokens, each cut at the first near-tie.

        The draw at a near-tie depends on the shape of the batch, so it cannot be compared.
        """
        todo, drawn = self.cut(asked, NEAR_TIE)
        assert all(drawn), "a first token is a near-tie: choose another seed"
        return todo, drawn

    def cut(self, asked: Sequence[Case], near_tie: float) -> tuple[list[Case], list[list[int]]]:
        """Like `decided`, but an answer is empty if its first token is a near-tie."""
        answers = self._answers()
        todo, drawn = [], []
        for case, tokens, margins in zip(
            asked, answers["tokens"], answers["margins"], strict=False
        ):
            clear = list(takewhile(lambda margin: margin > near_tie, margins))
            todo.append(replace(case, max_tokens=max(1, len(clear))))
            drawn.append(tokens[: len(clear)])
        return todo, drawn

    def _answers(self) -> dict[str, list[Any]]:
        self.process.join(400)
        assert self.process.exitcode == 0, (self.folder / "log").read_text()[-2000:]
        answers: dict[str, list[Any]] = json.loads((self.folder / "tokens.json").read_text())
        return answers


@pytest.fixture(scope="session", autouse=True)
def _preloaded() -> Iterator[None]:
    with preloaded():
        yield


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return smollm2.ensure(smollm2.DEFAULT_DIR, print).resolve()


@contextmanager
def plain_vllm(
    model_dir: Path,
    asked: Sequence[Case],
    folder: Path,
    dtype: str = DTYPE,
    block_size: int = BLOCK_SIZE,
    **engine: object,
) -> Iterator[Plain]:
    """Run plain vLLM with these engine arguments in a separate process, which draws the cases."""
    cases_file, tokens_file = folder / "cases.json", folder / "tokens.json"
    cases_file.write_text(json.dumps([asdict(case) for case in asked]))
    arguments = [model_dir, dtype, block_size, cases_file, tokens_file, json.dumps(engine)]
    process = run_main(plain_vllm_main, [str(argument) for argument in arguments], folder / "log")
    try:
        yield Plain(process, folder)
    finally:
        process.kill()
        process.join()


@pytest.fixture(scope="session")
def plain(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    """Plain vLLM, which draws the cases while the engines under test start."""
    asked = [*cases(BLOCK_SIZE), *long_cases()]
    with plain_vllm(model_dir, asked, tmp_path_factory.mktemp("plain")) as plain:
        yield plain


@pytest.fixture(scope="session")
def reference(plain: Plain) -> Reference:
    todo, tokens = plain.decided(cases(BLOCK_SIZE))
    return Reference(todo, tokens, long_cases(), plain.tokens()[len(todo) :])


def engine_config(instance_id: str, incarnation: int, model_dir: Path) -> VllmConfig:
    return VllmConfig(
        instance_id,
        incarnation,
        model_dir,
        "m",
        dtype=DTYPE,
        block_size=BLOCK_SIZE,
        async_scheduling=ASYNC_SCHEDULING,
    )


def prefill_config(model_dir: Path) -> VllmConfig:
    return replace(engine_config("prefill-0", 1, model_dir), landing_bytes=0)


def decode_config(model_dir: Path) -> VllmConfig:
    return replace(engine_config("decode-0", 2, model_dir), staging_bytes=0)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(request: pytest.FixtureRequest, model_dir: Path) -> AsyncIterator[Pair]:
    """A prefill and a decode.

    If any test needs `plain`, plain vLLM starts first, and computes while the pair starts.
    """
    items = request.session.items
    if any("plain" in getattr(item, "fixturenames", ()) for item in items):
        request.getfixturevalue("plain")
    prefilling, decoding = running(prefill_config(model_dir)), running(decode_config(model_dir))
    async with prefilling as prefill, decoding as decode:
        yield Pair(prefill, decode)
