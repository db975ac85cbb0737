"""A prefill, a decode and an encoder answer as plain vLLM does, with a model that has M-RoPE.

Plain vLLM is vLLM without the mesh. With M-RoPE, the tokens of an image have positions by row and
column. The positions of the text after an image continue from the image's longer side. So a decode
needs the number of rows of each image, even if it has the KV of the whole prompt.
"""

from __future__ import annotations

import io
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdmesh.core.images.prompt_image import ImageFacts
from pdmesh.core.images.token_grid import GridRule
from tests.e2e.cases import Case, differences
from tests.e2e.conftest import decode_config, plain_vllm, prefill_config
from tests.e2e.images.test_encoder import answered, counts, encoder_config, encoding, grown
from tests.e2e.images.test_engine import (
    SMALL,
    VISION,
    Wanted,
    check_answers,
    picture,
    text,
)
from tests.e2e.images.tiny_qwen2_vl import (
    FACTOR,
    IMAGE,
    MAX_PIXELS,
    MIN_PIXELS,
    write_tiny_qwen2_vl,
)
from tests.e2e.pair import LegFailed, Pair, locally, running

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.req("S129"),
]
NUM_TOKENS = 10
FACTS = ImageFacts(IMAGE, (), 8, GridRule(FACTOR, MIN_PIXELS, MAX_PIXELS))
TRUSTING: dict[str, Any] = {"trust_remote_code": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_vl(tmp_path_factory.mktemp("models") / "qwen2-vl")


def turned(data: bytes) -> bytes:
    """The picture as a camera on its side writes it, with an EXIF orientation."""
    from PIL import Image

    exif, out = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    Image.open(io.BytesIO(data)).save(out, "JPEG", exif=exif)
    return out.getvalue()


@pytest.fixture(scope="module")
def wanted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    """Prompts with images of several shapes at different places, and prompts without an image.

    An image is at the beginning, in the middle, across the end of a block, or at the end. Some
    prompts have several images. Two images have the same number of tokens, but different numbers of
    rows.
    """
    folder = tmp_path_factory.mktemp("pictures")
    wide, tall = picture(1, (42, 84)), picture(2, (84, 42))
    files = [wide, tall, picture(3, (300, 20), "JPEG"), picture(4, (5, 5), "WEBP"),
             picture(5, (14, 98)), turned(picture(6, (40, 90)))]  # fmt: skip
    paths = [str(folder / str(at)) for at in range(len(files))]
    for path, data in zip(paths, files, strict=True):
        Path(path).write_bytes(data)
    one, two, thin, small, line, camera = paths
    prompts: list[tuple[tuple[int, ...], tuple[str, ...]]] = [
        ((*text(before, 1), IMAGE, *text(after, 2)), (path,))
        for before, after, images in (
            (0, 20, (one, two)), (70, 130, (thin, small)), (60, 3, (camera, line)),
            (200, 1, (two, one)),
        )
        for path in images
    ]  # fmt: skip
    several = (*text(20, 3), IMAGE, *text(50, 4), IMAGE, *text(9, 5))
    prompts += [(several, images) for images in ((one, two), (two, one), (line, thin))]
    prompts += [((IMAGE, 7, IMAGE, 5), (small, line)), (text(100, 6), ()), (text(9, 7), ())]
    cases = [
        Case(prompt, NUM_TOKENS, temperature, 7, images=images)
        for prompt, images in prompts
        for temperature in (0.0, 1.0)
    ]
    with plain_vllm(model, cases, folder, **VISION, **TRUSTING) as plain:
        return Wanted(*plain.decided(cases), FACTS)


def configured(config: Any, **changes: Any) -> Any:
    """The type is Any because `config` is the configuration of an engine of any role."""
    return replace(config, engine_args=TRUSTING, **SMALL, **changes)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(model: Path, wanted: Wanted) -> AsyncIterator[Pair]:
    async with (
        running(configured(prefill_config(model))) as first,
        running(configured(decode_config(model))) as second,
    ):
        yield Pair(first, second)


async def test_the_engine_says_how_it_resizes_an_image(pair: Pair) -> None:
    assert pair.prefill.info.images == pair.decode.info.images == FACTS


@pytest.mark.parametrize("is_per_layer", [False, True])
async def test_a_pair_answers_as_plain_vllm_does(
    pair: Pair, wanted: Wanted, is_per_layer: bool
) -> None:
    await check_answers(pair, wanted, is_per_layer=is_per_layer)


async def test_an_answer_goes_on_from_the_rows_that_decode_was_told(
    pair: Pair, wanted: Wanted
) -> None:
    """The negative control: the decode gets the information that an image's tokens are in one row,
    as text is. Images of one row or one column are left out, because this changes nothing for them.
    """
    expected, got = [], []
    for (prompt, images, sampling), tokens in zip(wanted.asked(), wanted.tokens, strict=True):
        if len(images) == 1 and 1 < images[0].num_rows < images[0].num_tokens:
            each = replace(pair, salt="one row", images=images)
            first = await each.prefilled(prompt, sampling)
            assert first.ticket is not None
            wrong = replace(each, images=(replace(images[0], num_rows=1),))
            rest = await wrong.decoded(prompt, first.token, first.ticket, sampling)
            got.append([first.token, *rest])
            expected.append(tokens)
    assert len(expected) > 6
    assert len(differences(expected, got)) == len(expected)


async def test_an_image_without_pixels_or_with_other_rows_fails_its_request(
    pair: Pair, wanted: Wanted
) -> None:
    """A decode that has lost the KV must not compute an image that it does not have."""
    prompt, images, sampling = wanted.asked()[0]
    bare = (replace(images[0], data=b""),)
    for host in (pair.prefill, pair.decode):
        with pytest.raises(LegFailed):
            await locally(host, prompt, sampling, images=bare)
    swapped = (replace(images[0], num_rows=images[0].num_tokens // images[0].num_rows),)
    with pytest.raises(LegFailed, match="turn it"):
        await locally(pair.prefill, prompt, sampling, images=swapped)
    rowless = (replace(images[0], num_rows=0),)
    with pytest.raises(LegFailed, match="rows"):
        await locally(pair.prefill, prompt, sampling, images=rowless)
    adjacent = replace(images[0], position=images[0].end)
    twice = array("I", [*prompt[: images[0].end], *prompt])
    with pytest.raises(LegFailed, match="side by side"):
        await locally(pair.prefill, twice, sampling, images=(images[0], adjacent))
    assert await locally(pair.prefill, prompt, sampling, images=images) == wanted.tokens[0]


@pytest.mark.req("S130")
async def test_embeddings_of_any_size_are_fetched_from_an_encoder(
    model: Path, pair: Pair, wanted: Wanted
) -> None:
    config = replace(encoder_config(model), engine_args=TRUSTING)
    before, num_images = counts(pair.prefill), 0
    async with encoding(config) as encoder:
        for (prompt, images, sampling), tokens in zip(wanted.asked(), wanted.tokens, strict=True):
            if images:
                await encoder.encode(images)
                got = await answered(pair.prefill, prompt, images, sampling, encoder.peer)
                assert got == tokens
                num_images += len({image.digest for image in images})
    assert grown(before, counts(pair.prefill)) == {"fetched": num_images}
