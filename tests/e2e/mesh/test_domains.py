"""A decode domain of two vLLM ranks is replaced as a whole when one rank is killed (S75, S121).

A domain consists of instances that compute one model together. At first, both ranks serve. No text
changes. The model is dense, so each rank is a separate engine, because vLLM's external mode is only
for a mixture of experts. The model is small, because four engines compute on the machine at once.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdmesh.launcher.mesh import Mesh
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1.common_pb2 import ROLE_DECODE
from tests.e2e.conftest import Plain, plain_vllm
from tests.e2e.mesh.test_equality import ask_all, texts
from tests.e2e.mesh.test_ranks import BLOCK_SIZE, rank_cases
from tests.e2e.mesh.test_substitution import LOAD_S, ask_until, is_whole, num_admitted, spec
from tests.fakes.tiny_llama import write_tiny_llama
from tests.support.sites.operator import Operator
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
NUM_CASES, NUM_CONCURRENT = 16, 4
DOMAIN = """
services:
  default:
    dp_size: {decode: 2}
scenarios:
  default: {allow_single: true}
groups:
  chat: {prefill: 1, decode: 1}
"""
ENV = {
    "PDMESH_BLOCK_SIZE": str(BLOCK_SIZE),
    "PDMESH_MAX_MODEL_LEN": "1024",
    "PDMESH_INSTANCE_KV_CACHE_BYTES": str(64 << 20),
}


@pytest.fixture(scope="module")
def tiny(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with SmolLM2's tokenizer."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def plain_tiny(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    folder = tmp_path_factory.mktemp("plain-tiny")
    sizes: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
    with plain_vllm(
        tiny, rank_cases()[:NUM_CASES], folder, block_size=BLOCK_SIZE, **sizes
    ) as plain:
        yield plain


@pytest.mark.req("S35", "S75", "S121")
@pytest.mark.fault("F1", "F2")
async def test_a_domain_of_two_vllm_ranks_is_replaced_when_one_dies_under_load(
    tiny: Path, plain_tiny: Plain, tmp_path: Path
) -> None:
    todo, tokens = await asyncio.to_thread(plain_tiny.decided, rank_cases()[:NUM_CASES])
    expected = texts(tiny, tokens)
    file = tmp_path / "groups.yaml"
    file.write_text(DOMAIN)
    asked = spec(tiny, file, num_blank=4)
    asked = replace(asked, env={**asked.env, **ENV})
    async with Mesh(asked, tmp_path / "mesh", report=print) as mesh:
        bus = await NatsBus.connect(mesh.nats_url, "test")
        operator = Operator(bus)
        await operator.listen()
        await until(lambda: is_whole(operator), within_s=LOAD_S)
        ranks = await operator.members(ROLE_DECODE)
        assert len(ranks) == 2
        assert await ask_all(mesh.http_url, todo, NUM_CONCURRENT) == expected
        assert all(num_admitted(mesh, rank) > 0 for rank in ranks), "placement goes to each rank"

        is_over = asyncio.Event()
        load = asyncio.create_task(ask_until(is_over, mesh.http_url, todo))
        operator.steps.clear()
        lost, survivor = ranks
        mesh.kill(lost)
        await until(lambda: [s for s in operator.steps if s.step == "lost"], within_s=60)
        await until(lambda: is_whole(operator), within_s=LOAD_S)
        assert operator.of(survivor)[0] == "broken_up"
        (given,) = [s for s in operator.steps if s.step == "assigned"]
        assert given.role == "decode"
        new = await operator.members(ROLE_DECODE)
        assert len(new) == 2
        await until(lambda: all(num_admitted(mesh, rank) > 0 for rank in new), within_s=120)
        is_over.set()
        rounds = await load
        assert rounds
        assert all(answers == expected for answers in rounds)
        await bus.close()
