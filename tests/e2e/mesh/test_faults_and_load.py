"""A vLLM mesh under faults and load, where every stream must end well.

tests/chaos and tests/integration have such tests on the simulated engine. They also judge times,
because the time of a simulated engine is known. Here, the model is a small Llama with random
weights, because up to four engines share two cores. The tokens of its answers must equal the tokens
of plain vLLM, which is vLLM without the mesh.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio

from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.net import subjects
from pdmesh.net.nats.bus import NatsBus
from tests.chaos.test_kill_matrix import CASES as ALL_FAULTS
from tests.chaos.test_kill_matrix import KILL, hit
from tests.chaos.test_kill_matrix import Case as Fault
from tests.e2e.cases import VOCABULARY, Case
from tests.e2e.conftest import plain_vllm
from tests.e2e.mesh.test_structured_output import PATIENCE, RESTART_S, num_admitted
from tests.fakes.tiny_llama import write_tiny_llama
from tests.integration.mesh.test_chat_homes import Chats
from tests.support.sites import fleet
from tests.support.streams import StreamOutcome, stream_completion
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
BLOCK_SIZE: Final = 32
MAX_TOKENS: Final = 40
ENGINES: Final = ("prefill-0", "decode-0")
# Every process is killed. Processes that serve requests are also asked to stop, and frozen.
FAULTS: Final = [
    fault for fault in ALL_FAULTS if fault.signal is KILL or fault.victim in (*ENGINES, "gateway-0")
]
NUM_CHATS, NUM_TURNS = 6, 4
NUM_AT_ONCE, MAX_WAITING = 60, 6
LONG = 900  # tokens in 29 blocks, of which the last is not full


def prompts(seed: int, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.choices(VOCABULARY, k=length)) for length in lengths]


STREAMS: Final = prompts(1, [1, 17, 31, 32, 33, 64, 90, 150, 200, 250, 300, 333])
LONGS: Final = prompts(2, [LONG] * 12)


def written_model(model_dir: Path, factory: pytest.TempPathFactory) -> Path:
    """A model with SmolLM2's tokenizer. The model knows the tokenizer's first 40,960 tokens."""
    folder = write_tiny_llama(factory.mktemp("tiny-llama"))
    for file in model_dir.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def plain_answers(model: Path, factory: pytest.TempPathFactory) -> dict[tuple[int, ...], list[int]]:
    """Plain vLLM's answers by prompt."""
    asked = [Case(prompt, MAX_TOKENS) for prompt in STREAMS]
    asked += [Case(prompt, 4) for prompt in LONGS]
    folder = factory.mktemp("plain")
    with plain_vllm(model, asked, folder, block_size=BLOCK_SIZE, max_model_len=1024) as plain:
        tokens = plain.tokens()
    return {case.prompt: drawn for case, drawn in zip(asked, tokens, strict=True)}


@pytest.fixture(scope="module")
def model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_model(model_dir, tmp_path_factory)


@pytest.fixture(scope="module")
def expected(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, ...], list[int]]:
    return plain_answers(model, tmp_path_factory)


def spec(model: Path, num_prefill: int, num_decode: int, **env: str) -> MeshSpec:
    return MeshSpec(
        engine="vllm",
        num_prefill=num_prefill,
        num_decode=num_decode,
        http_port=0,
        grpc_port=0,
        model_dir=model,
        dtype="float32",
        env={
            **PATIENCE,
            "PDMESH_BLOCK_SIZE": str(BLOCK_SIZE),
            "PDMESH_MAX_MODEL_LEN": "1024",
            # without a plan, a gateway does not know the decode that serves a chat
            "PDMESH_GATEWAY_PLAN_TIMEOUT_S": "60",
            **{f"PDMESH_{name}": value for name, value in env.items()},
        },
        start_timeout_s=RESTART_S,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs(
    model: Path,
    expected: dict[tuple[int, ...], list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Mesh]:
    """Two prefills and two decodes, each with room for all streams.

    All fault cases use this mesh.
    """
    slots = {"PREFILL_NUM_SLOTS": "16", "DECODE_NUM_SLOTS": "16"}
    async with Mesh(spec(model, 2, 2, **slots), tmp_path_factory.mktemp("pairs")) as mesh:
        yield mesh


async def ask(mesh: Mesh, client: httpx.AsyncClient, prompt: Sequence[int]) -> StreamOutcome:
    return await stream_completion(
        client, mesh.http_url, prompt, MAX_TOKENS, ignore_eos=True, return_token_ids=True
    )


@pytest.mark.req("S37", "S74")
@pytest.mark.fault("F1", "F4", "F5", "F6", "F7", "F8", "F9", "F10", "F11", "F13", "F14", "F16")
@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_every_stream_of_vllm_ends_well_when_one_process_is_hit(
    pairs: Mesh,
    client: httpx.AsyncClient,
    expected: dict[tuple[int, ...], list[int]],
    fault: Fault,
) -> None:
    await pairs.wait_ready(timeout_s=RESTART_S)
    busy = fault.victim if fault.victim in ENGINES else "decode-0"
    enough, pid = num_admitted(pairs, busy) + 2, pairs.pid(fault.victim)
    streams = [asyncio.create_task(ask(pairs, client, prompt)) for prompt in STREAMS * 2]
    await until(lambda: num_admitted(pairs, busy) >= enough)
    await hit(pairs, fault, pid)
    outcomes = await asyncio.wait_for(asyncio.gather(*streams), RESTART_S)
    await pairs.wait_ready([fault.victim], RESTART_S)

    async def works() -> bool:
        return (await ask(pairs, client, STREAMS[3])).token_ids == expected[STREAMS[3]]

    await until(works)
    await fleet.until_nothing_held(pairs, within_s=120)
    for outcome in outcomes:
        whole = expected[tuple(outcome.prompt)]
        assert outcome.fault_in_ending() == ""
        assert outcome.is_complete or fault.may_fail, outcome
        assert outcome.token_ids == whole[: len(outcome.token_ids)]
        assert len(outcome.token_ids) == len(whole) or not outcome.is_complete


@pytest.mark.req("S94")
async def test_every_turn_of_a_chat_goes_to_the_decode_of_its_first_and_finds_its_kv(
    pairs: Mesh, client: httpx.AsyncClient
) -> None:
    """Every turn's prompt continues the turn before. The full blocks of that turn are not computed
    again.
    """
    await pairs.wait_ready(timeout_s=RESTART_S)
    chats = Chats(pairs, client)
    bus = await NatsBus.connect(pairs.nats_url, "test-chats")
    await bus.subscribe(subjects.request_finished(), chats.hear)
    texts = prompts(3, [40 + 60 * NUM_TURNS] * NUM_CHATS)
    homes: dict[int, set[str]] = defaultdict(set)
    for turn, (chat, text) in itertools.product(range(NUM_TURNS), enumerate(texts)):
        length = 40 + 60 * turn
        homes[chat].add(await chats.turn(f"chat-{chat}", list(text[:length])))
    assert all(len(home) == 1 for home in homes.values()), homes
    assert len(set().union(*homes.values())) == 2, "chats are spread over the decodes"
    cached = [await cached_tokens(pairs, client, text) for text in texts]
    assert cached == [(40 + 60 * (NUM_TURNS - 1)) // BLOCK_SIZE * BLOCK_SIZE] * NUM_CHATS
    await bus.close()


async def cached_tokens(mesh: Mesh, client: httpx.AsyncClient, prompt: Sequence[int]) -> int:
    answer = await completed(mesh, client, prompt)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def completed(mesh: Mesh, client: httpx.AsyncClient, prompt: Sequence[int]) -> dict[str, Any]:
    body = {"model": "default", "prompt": list(prompt), "max_tokens": 4, "temperature": 0}
    url = f"{mesh.http_url}/v1/completions"
    more = {"ignore_eos": True, "return_token_ids": True}
    answer = await client.post(url, json={**body, **more})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(
    model: Path,
    expected: dict[tuple[int, ...], list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Mesh]:
    """Two prefills with one slot each, a cache of two long prompts, and a host pool."""
    few = {
        "PREFILL_NUM_SLOTS": "1",
        "PREFILL_KV_CACHE_BYTES": str(16 << 20),
        "PREFILL_KV_HOST_POOL_BYTES": str(256 << 20),
        "KV_TIER_TIMEOUT_S": "30",
        "DECODE_NUM_SLOTS": "4",
        "GATEWAY_MAX_WAITING": str(MAX_WAITING),
    }
    async with Mesh(spec(model, 2, 1, **few), tmp_path_factory.mktemp("narrow")) as mesh:
        yield mesh


@pytest.mark.req("S43", "S44")
@pytest.mark.fault("F36")
async def test_more_requests_than_a_vllm_mesh_has_room_for_are_refused_and_none_hangs(
    narrow: Mesh, client: httpx.AsyncClient, expected: dict[tuple[int, ...], list[int]]
) -> None:
    todo = list(itertools.islice(itertools.cycle(STREAMS), NUM_AT_ONCE))
    asking = asyncio.gather(*(ask(narrow, client, prompt) for prompt in todo))
    outcomes = await asyncio.wait_for(asking, RESTART_S)
    refused = [outcome for outcome in outcomes if not outcome.is_complete]
    for outcome in outcomes:
        assert outcome.fault_in_ending() == ""
        if outcome.is_complete:
            assert outcome.token_ids == expected[tuple(outcome.prompt)]
        else:
            assert outcome.status in (429, 503), outcome
            assert outcome.retry_after is not None
    assert refused, "there is no room for all"
    assert len(outcomes) - len(refused) >= MAX_WAITING, "those that wait are served"
    await fleet.until_nothing_held(narrow, within_s=120)
    assert (await ask(narrow, client, STREAMS[0])).token_ids == expected[STREAMS[0]]


def served(mesh: Mesh, tier: str) -> float:
    """The number of blocks that prefills took from a tier."""
    prefills = ("prefill-0", "prefill-1")
    return fleet.counted(mesh, prefills, "pdmesh_kv_tier_blocks_total", tier=tier, event="served")


@pytest.mark.req("S68", "S76", "S77", "S106")
async def test_blocks_that_vllm_evicted_come_from_the_pool_that_the_index_names(
    narrow: Mesh, client: httpx.AsyncClient, expected: dict[tuple[int, ...], list[int]]
) -> None:
    """A prefill takes blocks from its own host pool, and also from the pool of the other prefill.
    Two equal prompts at the same time go to both prefills.
    """

    async def right(prompt: tuple[int, ...]) -> int:
        answer = await completed(narrow, client, prompt)
        assert answer["choices"][0]["token_ids"] == expected[prompt]
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    for prompt in LONGS:
        assert await right(prompt) == 0
    before = served(narrow, "host")
    num_full = (LONG - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert [await right(prompt) for prompt in LONGS[:4]] == [num_full] * 4
    assert served(narrow, "host") > before, "vLLM's own cache holds two of them"
    again = itertools.cycle(LONGS)

    async def is_fetched_from_another() -> bool:
        prompt = next(again)
        await asyncio.gather(right(prompt), right(prompt))
        return served(narrow, "peer") > 0

    await until(is_fetched_from_another)
