"""A prefill and a decode on vLLM answer about images as plain vLLM does.

Plain vLLM is vLLM without the mesh. The names of KV blocks differ by image. The test writes its
model, a LLaVA with random weights. vLLM runs the model with the code of transformers, because its
own code needs a torchvision that does not run with the CPU build of torch.
"""

from __future__ import annotations

import asyncio
import io
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdmesh.core.images.header import read_header
from pdmesh.core.images.prompt_image import ImageFacts, PromptImage, digest_of, expanded
from pdmesh.engine.base import Sampling
from pdmesh.kv.tiers.config import TierConfig
from tests.e2e.cases import Case, differences
from tests.e2e.conftest import decode_config, plain_vllm, prefill_config
from tests.e2e.images.tiny_llava import EOS, IMAGE, NUM_IMAGE_TOKENS, write_tiny_llava
from tests.e2e.pair import LegFailed, Pair, locally, running

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
NUM_TOKENS = 10
FACTS = ImageFacts(IMAGE, (IMAGE,) * NUM_IMAGE_TOKENS, 8)
VISION: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "model_impl": "transformers",
    "max_model_len": 1024,
}
SMALL: dict[str, Any] = {"max_model_len": 1024, "kv_cache_bytes": 64 << 20}


def picture(seed: int, size: tuple[int, int] = (40, 60), form: str = "PNG") -> bytes:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form)
    return out.getvalue()


@dataclass(frozen=True)
class Wanted:
    """The cases in plain vLLM's form, and plain vLLM's answers."""

    cases: list[Case]
    tokens: list[list[int]]
    facts: ImageFacts = FACTS  # facts about the model

    def asked(self) -> list[tuple[array[int], tuple[PromptImage, ...], Sampling]]:
        return [(*placed(case, self.facts), case.sampling()) for case in self.cases]


def placed(case: Case, facts: ImageFacts = FACTS) -> tuple[array[int], tuple[PromptImage, ...]]:
    """The prompt as a gateway makes it, with all tokens of its images."""
    files = [Path(path).read_bytes() for path in case.images]
    sizes = [read_header(data).shown_size for data in files]
    prompt, places = expanded(array("I", case.prompt), facts, sizes)
    return prompt, tuple(
        PromptImage(place.position, place.num_tokens, digest_of(data), data, place.num_rows)
        for place, data in zip(places, files, strict=True)
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llava(tmp_path_factory.mktemp("models") / "llava")


def text(length: int, seed: int) -> tuple[int, ...]:
    return tuple((seed * 31 + at * 7) % 250 for at in range(length))


@pytest.fixture(scope="module")
def wanted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    """Prompts with images at different places, and one prompt without an image.

    An image is at the beginning, in the middle, across the end of a block, or at the end. Some
    prompts have several images. Each prompt with images also comes with other images.
    """
    folder = tmp_path_factory.mktemp("pictures")
    made = [picture(1), picture(2, (300, 20), "JPEG"), picture(3, (28, 28), "WEBP"),
            picture(4, (64, 64), "GIF"), picture(5), picture(6)]  # fmt: skip
    paths = [str(folder / str(at)) for at in range(len(made))]
    for path, data in zip(paths, made, strict=True):
        Path(path).write_bytes(data)
    one, two, three, four, five, six = paths
    places = (
        (0, 20, (one, two)), (70, 130, (three, four)), (60, 3, (five, six)), (200, 1, (two, one)),
    )  # fmt: skip
    prompts: list[tuple[tuple[int, ...], tuple[str, ...]]] = [
        ((*text(before, 1), IMAGE, *text(after, 2)), (path,))
        for before, after, images in places
        for path in images
    ]
    two_images = (*text(20, 3), IMAGE, *text(50, 4), IMAGE, *text(9, 5))
    prompts += [(two_images, images) for images in ((one, two), (two, one), (one, one))]
    prompts.append((text(100, 6), ()))
    cases = [
        Case(prompt, NUM_TOKENS, temperature, 7, images=images)
        for prompt, images in prompts
        for temperature in (0.0, 1.0)
    ]
    cases += [
        replace(case, form=("choice", '["yes", "no", "maybe"]'), stop_token_ids=(EOS,))
        for case in cases[:8]
    ]
    with plain_vllm(model, cases, folder, **VISION) as plain:
        todo, tokens = plain.decided(cases)
    answers = {case.prompt: set[tuple[int, ...]]() for case in todo}
    for case, answer in zip(todo, tokens, strict=True):
        if case.form is None:
            answers[case.prompt].add(tuple(answer))
    with_images = [found for prompt, found in answers.items() if IMAGE in prompt]
    assert all(len(found) > 2 for found in with_images), "other images would change no answer"
    return Wanted(todo, tokens)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(model: Path, wanted: Wanted) -> AsyncIterator[Pair]:
    tiers = TierConfig(host_pool_bytes=64 << 20, timeout_s=30.0)
    prefill = replace(prefill_config(model), tiers=tiers, **SMALL)
    async with (
        running(prefill) as first,
        running(replace(decode_config(model), **SMALL)) as second,
    ):
        yield Pair(first, second)


@pytest.mark.req("S1", "S128")
async def test_the_engine_says_which_tokens_stand_for_an_image(pair: Pair) -> None:
    assert pair.prefill.info.images == pair.decode.info.images == FACTS


@pytest.mark.req("S128")
@pytest.mark.parametrize("is_per_layer", [False, True])
async def test_a_pair_answers_about_images_as_plain_vllm_does(
    pair: Pair, wanted: Wanted, is_per_layer: bool
) -> None:
    await check_answers(pair, wanted, is_per_layer=is_per_layer)


async def check_answers(pair: Pair, wanted: Wanted, *, is_per_layer: bool) -> None:
    """Check that the pair gives plain vLLM's answers, that its decode computes no prompt, and that
    both engines become idle.
    """
    salted = replace(pair, salt=f"per layer {is_per_layer}")
    got = []
    for prompt, images, sampling in wanted.asked():
        each = replace(salted, images=images)
        generate = each.generate_per_layer if is_per_layer else each.generate
        got.append(await generate(prompt, sampling))
        assert each.num_computed_at_decode == 0
    assert differences(wanted.tokens, got) == []
    await pair.prefill.until_idle()
    await pair.decode.until_idle()


@pytest.mark.req("S128")
async def test_many_at_once_share_kv_only_with_an_equal_image(pair: Pair, wanted: Wanted) -> None:
    """All requests have one salt. So blocks with equal names share their KV on both sides."""

    async def ask(
        prompt: array[int], images: tuple[PromptImage, ...], sampling: Sampling
    ) -> list[int]:
        return await replace(pair, images=images).generate(prompt, sampling)

    for _ in range(2):
        got = await asyncio.gather(*(ask(*each) for each in wanted.asked()))
        assert differences(wanted.tokens, got) == []


@pytest.mark.req("S128")
async def test_one_engine_alone_answers_as_plain_vllm_does(pair: Pair, wanted: Wanted) -> None:
    got = [await locally(pair.decode, p, s, images=i) for p, i, s in wanted.asked()]
    assert differences(wanted.tokens, got) == []


@pytest.mark.req("S80", "S128")
async def test_blocks_have_the_names_that_a_gateway_gives_them(pair: Pair, wanted: Wanted) -> None:
    """Blocks in the engine's cache and in the host pool have these names. The second request finds
    the blocks.
    """
    host = pair.prefill
    prompt, images, sampling = max(wanted.asked(), key=lambda each: len(each[0]))
    each = replace(pair, images=images, salt="names")
    assert images
    names = each.names(prompt)
    assert await each.prefilled(prompt, replace(sampling, max_tokens=1))
    await host.until(lambda: set(names) <= host.blocks and set(names) <= host.pool_blocks)
    again = await each.prefilled(prompt, replace(sampling, max_tokens=1))
    assert again.num_cached_tokens == (len(prompt) - 1) // 64 * 64
    others = tuple(replace(image, digest=bytes(32)) for image in images)
    differing = replace(each, images=others).names(prompt)
    begins = images[0].position // 64
    assert differing[:begins] == names[:begins]
    assert not set(differing[begins:]) & set(names)


@pytest.mark.req("S128")
async def test_an_image_that_cannot_be_decoded_fails_its_own_request_only(
    pair: Pair, wanted: Wanted
) -> None:
    prompt, images, sampling = next(each for each in wanted.asked() if each[1])
    data = images[0].data[: len(images[0].data) // 2]
    damaged = (replace(images[0], data=data, digest=digest_of(data)), *images[1:])
    for host in (pair.prefill, pair.decode):
        with pytest.raises(LegFailed) as failed:
            await locally(host, prompt, sampling, images=damaged)
        assert failed.value.reason == "IMAGE_UNUSABLE"
    with pytest.raises(LegFailed, match="other tokens"):
        await locally(pair.prefill, [1, *prompt], sampling, images=images)
    assert await locally(pair.prefill, prompt, sampling, images=images)


@pytest.mark.req("S128")
async def test_a_decode_that_lost_the_kv_of_an_image_fails_the_request(
    model: Path, pair: Pair, wanted: Wanted
) -> None:
    """The decode's cache is too small for all answers, so vLLM preempts some requests. The decode
    computes a preempted request without an image again. It fails a request with an image, because
    the tokens alone have another meaning.
    """
    tiers = TierConfig(host_pool_bytes=64 << 20, timeout_s=30.0)
    config = replace(decode_config(model), instance_id="decode-1", max_model_len=512, tiers=tiers)
    sampling = Sampling(220)
    (data,) = {images[0].data for _, images, _ in wanted.asked()[:1]}
    asked = []
    for seed in range(10, 14):
        tokens = array("I", (*text(10, seed), IMAGE, *text(20, seed)))
        prompt, ((at, num_tokens, _),) = expanded(tokens, FACTS, [(60, 40)])
        asked.append((prompt, (PromptImage(at, num_tokens, digest_of(data), data),)))
    expected = [await locally(pair.decode, p, sampling, images=i) for p, i in asked]
    block_bytes = pair.decode.info.kv_bytes_per_token * 64
    async with running(replace(config, kv_cache_bytes=9 * block_bytes)) as small:
        each = replace(pair, decode=small, salt="preempted")
        work = [replace(each, images=i).generate(prompt, sampling) for prompt, i in asked]
        got = await asyncio.gather(*work, return_exceptions=True)
        assert any(isinstance(answer, LegFailed) for answer in got)
        for right, answer in zip(expected, got, strict=True):
            if isinstance(answer, BaseException):
                assert isinstance(answer, LegFailed)
            else:
                assert answer[:NUM_TOKENS] == right[:NUM_TOKENS]
        await small.until_idle()
