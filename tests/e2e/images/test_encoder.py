"""An encoder on vLLM makes embeddings of images, and another engine fetches them.

The answers must equal those of plain vLLM, which is vLLM without the mesh, even if the embeddings
do not arrive. Without torchvision, as on a CPU, the encoder loads the whole model (see
`VllmEncoderConfig`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.core.images.prompt_image import PromptImage
from pdmesh.engine.base import (
    Encoded,
    EncodeJob,
    EngineInfo,
    Failed,
    KvPeer,
    Output,
    PrefillJob,
    Sampling,
)
from pdmesh.engine.vllm.encoding.config import VllmEncoderConfig
from pdmesh.engine.vllm.encoding.engine import VllmEncoderEngine
from tests.e2e.cases import Case
from tests.e2e.conftest import DTYPE, plain_vllm, prefill_config
from tests.e2e.images.test_engine import SMALL, VISION, Wanted, picture, text
from tests.e2e.images.tiny_llava import IMAGE, write_tiny_llava
from tests.e2e.pair import Host, Pair, running, whole_answer

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.req("S130"),
]
NUM_TOKENS = 10
SALT = "tenant"
_legs = itertools.count(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llava(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(scope="module")
def wanted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    folder = tmp_path_factory.mktemp("pictures")
    paths = [str(folder / str(seed)) for seed in range(4)]
    for seed, path in enumerate(paths):
        Path(path).write_bytes(picture(seed))
    one, two, three, four = paths
    shown: list[tuple[str, ...]] = [(one,), (two,), (three, four), (four, three), (one, one)]
    cases = []
    for at, images in enumerate(shown):
        inner = [token for _ in images for token in (*text(30, at), IMAGE)]
        cases.append(Case((*inner, *text(20, 9)), NUM_TOKENS, images=images))
    with plain_vllm(model, cases, folder, **VISION) as plain:
        return Wanted(*plain.decided(cases))


@dataclass(slots=True)
class EncoderHost:
    engine: VllmEncoderEngine
    info: EngineInfo
    outputs: dict[int, asyncio.Queue[Output]] = field(default_factory=dict)

    @property
    def peer(self) -> KvPeer:
        return KvPeer("encoder-0", 1, self.info.kv_addresses)

    async def pump(self) -> None:
        async for batch in self.engine.outputs():
            for output in batch:
                assert isinstance(output, Encoded | Failed)
                self.outputs[output.leg].put_nowait(output)

    async def encode(self, images: tuple[PromptImage, ...], salt: str = SALT) -> int:
        """Encode the images, and return how many of them the encoder did not hold before."""
        leg = next(_legs)
        self.outputs[leg] = asyncio.Queue()
        self.engine.encode(EncodeJob(leg, "r", images, salt))
        output = await asyncio.wait_for(self.outputs[leg].get(), 120)
        assert isinstance(output, Encoded), output
        return output.num_computed


def encoder_config(model: Path, failpoints: str = "") -> VllmEncoderConfig:
    return VllmEncoderConfig(
        "encoder-0", 1, model, "tiny", dtype=DTYPE, failpoints=failpoints,
        max_model_len=256, kv_cache_bytes=32 << 20,
    )  # fmt: skip


@asynccontextmanager
async def encoding(config: VllmEncoderConfig) -> AsyncIterator[EncoderHost]:
    engine = VllmEncoderEngine(config)
    host = EncoderHost(engine, await engine.start())
    pump = asyncio.create_task(host.pump())
    try:
        yield host
    finally:
        pump.cancel()
        await asyncio.wait([pump])
        await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def encoder(model: Path, wanted: Wanted) -> AsyncIterator[EncoderHost]:
    async with encoding(encoder_config(model)) as host:
        yield host


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def computing(model: Path, wanted: Wanted) -> AsyncIterator[Host]:
    """An engine that computes the whole answer, as a fusion instance does."""
    async with running(replace(prefill_config(model), **SMALL)) as host:
        yield host


async def answered(
    host: Host,
    prompt: array[int],
    images: tuple[PromptImage, ...],
    sampling: Sampling,
    peer: KvPeer | None,
    salt: str = SALT,
) -> list[int]:
    leg = Pair(host, host).next_leg(host)
    job = PrefillJob(
        leg, "r", 0, prompt, sampling, cache_salt=salt, images=images, awaits_embeddings=True
    )
    host.engine.prefill(job)
    host.engine.embedded(leg, peer)
    return await whole_answer(host, leg)


def counts(host: Host) -> dict[str, int]:
    prefix = "num_embeddings_"
    extra = host.engine.stats().extra
    return {k.removeprefix(prefix): int(v) for k, v in extra.items() if k.startswith(prefix)}


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - num for name, num in before.items() if after[name] != num}


async def test_answers_with_fetched_embeddings_are_those_of_plain_vllm(
    encoder: EncoderHost, computing: Host, wanted: Wanted
) -> None:
    """Each image is encoded once, no matter how many prompts have it."""
    before, num_computed = counts(computing), 0
    for (prompt, images, sampling), tokens in zip(wanted.asked(), wanted.tokens, strict=True):
        num_computed += await encoder.encode(images)
        got = await answered(computing, prompt, images, sampling, encoder.peer)
        assert got == tokens
    asked = wanted.asked()
    assert num_computed == len({image.digest for _, images, _ in asked for image in images})
    num_fetched = sum(len({image.digest for image in images}) for _, images, _ in asked)
    assert grown(before, counts(computing)) == {"fetched": num_fetched}
    await computing.until_idle()


async def test_many_prompts_at_once_encode_an_image_once(
    encoder: EncoderHost, computing: Host, wanted: Wanted
) -> None:
    images = wanted.asked()[0][1]
    alone = [encoder.encode(images, "another") for _ in range(5)]
    assert sum(await asyncio.gather(*alone)) == 1
    asked = wanted.asked()[:1] * 5
    work = (answered(computing, *each, encoder.peer, "another") for each in asked)
    assert await asyncio.gather(*work) == [wanted.tokens[0]] * 5
    await computing.until_idle()


async def test_what_does_not_come_is_encoded_here(
    encoder: EncoderHost, computing: Host, wanted: Wanted
) -> None:
    """The encoder has not encoded the images under these salts, so it does not hold them."""
    (prompt, images, sampling), tokens = wanted.asked()[0], wanted.tokens[0]
    before = counts(computing)
    assert await answered(computing, prompt, images, sampling, encoder.peer, "empty") == tokens
    assert await answered(computing, prompt, images, sampling, None, "refused") == tokens
    stale = replace(encoder.peer, incarnation=2)
    assert await answered(computing, prompt, images, sampling, stale, "stale") == tokens
    assert grown(before, counts(computing)) == {"lost": 2, "not_made": 1}
    await computing.until_idle()


async def test_the_answer_depends_on_the_embeddings_that_were_fetched(
    model: Path, computing: Host, wanted: Wanted
) -> None:
    """The negative control: the encoder's embeddings are all zeros."""
    (prompt, images, sampling), tokens = wanted.asked()[1], wanted.tokens[1]
    zeroing = encoder_config(model, "encode.published=zero-embeddings")
    async with encoding(zeroing) as wrong:
        await wrong.encode(images, "zero")
        got = await answered(computing, prompt, images, sampling, wrong.peer, "zero")
    assert got != tokens


@pytest.mark.fault("F1")
async def test_an_encoder_that_was_killed_costs_no_answer(
    model: Path, computing: Host, wanted: Wanted
) -> None:
    """The encoder has reported the embeddings, and dies before they are fetched."""
    (prompt, images, sampling), tokens = wanted.asked()[2], wanted.tokens[2]
    before = counts(computing)
    async with encoding(encoder_config(model)) as victim:
        await victim.encode(images, "killed")
        for pid in victim.engine.worker_pids:
            os.kill(pid, signal.SIGKILL)
        got = await answered(computing, prompt, images, sampling, victim.peer, "killed")
    assert got == tokens
    assert grown(before, counts(computing)) == {"lost": len(images)}
    await computing.until_idle()
