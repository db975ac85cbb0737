"""The engines and the reference answers, each started once for all e2e tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.models import smollm2
from tests.e2e.cases import Case, cases, long_cases
from tests.e2e.pair import Pair, running

BLOCK_SIZE = 64
DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class Reference:
    """What plain vLLM, started for this run, draws for the cases."""

    cases: list[Case]
    tokens: list[list[int]]
    long_cases: list[Case]
    long_tokens: list[list[int]]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return smollm2.ensure(smollm2.DEFAULT_DIR, print).resolve()


@pytest.fixture(scope="session")
def plain(model_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Plain vLLM at work on the cases, beside the engines' start."""
    command = [sys.executable, "-m", "tests.e2e.plain_vllm", str(model_dir), DTYPE, str(BLOCK_SIZE)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(scope="session")
def reference(plain: subprocess.Popen[str]) -> Reference:
    short, long = cases(BLOCK_SIZE), long_cases()
    asked = [(case.prompt, case.max_tokens) for case in [*short, *long]]
    answers, errors = plain.communicate(json.dumps(asked), timeout=400)
    assert plain.returncode == 0, errors[-2000:]
    tokens = json.loads(answers)
    return Reference(short, tokens[: len(short)], long, tokens[len(short) :])


def prefill_config(model_dir: Path) -> VllmConfig:
    return VllmConfig(
        "prefill-0", 1, model_dir, "m", dtype=DTYPE, block_size=BLOCK_SIZE, landing_bytes=0
    )


def decode_config(model_dir: Path) -> VllmConfig:
    return VllmConfig(
        "decode-0", 2, model_dir, "m", dtype=DTYPE, block_size=BLOCK_SIZE, staging_bytes=0
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(model_dir: Path) -> AsyncIterator[Pair]:
    async with running(prefill_config(model_dir)) as prefill:
        async with running(decode_config(model_dir)) as decode:
            yield Pair(prefill, decode)
