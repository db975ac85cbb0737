"""The inputs of a vLLM request that has images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pdmesh.core.images.prompt_image import ImageFacts, PromptImage, digest_of
from pdmesh.core.images.token_grid import GridRule
from pdmesh.engine.vllm.images import inputs, processing
from pdmesh.engine.vllm.images.inputs import VllmImages
from pdmesh.engine.vllm.images.processing import GRID
from pdmesh.errors import EngineFailed, ImageMisfit, ImageUnusable
from tests.support.images import model as image_model
from tests.support.images.files import png
from tests.support.images.model import MERGE_SIZE, Place, Process, by_rule, fixed, model

pytest.importorskip("PIL")
vllm_without_vllm = image_model.vllm_without_vllm

FACTS = ImageFacts(9, (9, 9), 8)
PROMPT = [1, 9, 9, 2, 9, 9]


def asked(*files: bytes, num_tokens: int = 2) -> list[PromptImage]:
    return [
        PromptImage(position, num_tokens, digest_of(data), data)
        for position, data in zip((1, 4), files, strict=False)
    ]


def two(placeholder: int, _: tuple[int, int]) -> Sequence[int]:
    return [placeholder] * 2


async def made(
    process: Process = two,
    files: Sequence[bytes] = (png(1, 8, 8), png(2, 9, 9)),
    salt: str = "",
    prompt: Sequence[int] = PROMPT,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Any:
    found = VllmImages(model(process), FACTS)
    return await found.input_of(list(prompt), asked(*files), salt, is_cancelled)


@pytest.mark.usefixtures("vllm_without_vllm")
async def test_vllms_only_thread_for_images_processes_them_in_their_order() -> None:
    found = await made()
    assert [(item["size"], item["thread"]) for item in found.items] == [
        ((8, 8), "only_0"),
        ((9, 9), "only_0"),
    ]
    assert found.places == [Place(1, 2), Place(4, 2)]


@pytest.mark.usefixtures("vllm_without_vllm")
async def test_the_name_of_an_image_tells_the_tenants_apart() -> None:
    """Otherwise the time to an answer would tell whether another tenant has sent the same image."""
    (one, _), (again, _), (other, _) = [(await made(salt=salt)).names for salt in ("a", "a", "b")]
    assert one == again != other
    digest = digest_of(png(1, 8, 8)).hex()
    assert {each.rpartition(":")[2] for each in (one, other)} == {digest}
    decode = [PromptImage(1, 2, digest_of(png(1, 8, 8)))]
    found = await VllmImages(model(two), FACTS).input_of(PROMPT, decode, "a", lambda: False)
    assert found.names == [one]


@pytest.mark.usefixtures("vllm_without_vllm")
@pytest.mark.parametrize("error", [MemoryError, OverflowError, ValueError, RuntimeError])
async def test_an_image_that_cannot_be_processed_is_the_clients_fault(
    error: type[Exception],
) -> None:
    def process(placeholder: int, _: tuple[int, int]) -> Sequence[int]:
        raise error

    with pytest.raises(ImageUnusable, match=error.__name__):
        await made(process)


@pytest.mark.usefixtures("vllm_without_vllm")
@pytest.mark.parametrize(
    ("process", "prompt"), [(fixed, PROMPT), (two, [1, *PROMPT]), (two, [1, 9, 9, 2, 9])]
)
async def test_other_tokens_than_the_models_are_a_misfit(
    process: Process, prompt: list[int]
) -> None:
    with pytest.raises(ImageMisfit):
        await made(process, prompt=prompt)


@pytest.mark.usefixtures("vllm_without_vllm")
@pytest.mark.parametrize(
    ("num_asked", "num_decoded", "num_processed"), [(0, 0, 0), (1, 1, 0), (2, 1, 1), (3, 2, 1)]
)
async def test_a_cancelled_request_is_neither_decoded_nor_processed(
    monkeypatch: pytest.MonkeyPatch, num_asked: int, num_decoded: int, num_processed: int
) -> None:
    answers = iter([False] * num_asked + [True])
    real, heard = processing.decoded, []

    def decode(data: bytes) -> Any:
        heard.append("decoded")
        return real(data)

    def process(placeholder: int, size: tuple[int, int]) -> Sequence[int]:
        heard.append("processed")
        return two(placeholder, size)

    monkeypatch.setattr(inputs, "decoded", decode)
    with pytest.raises(EngineFailed, match="given up"):
        await made(process, is_cancelled=lambda: next(answers))
    assert (heard.count("decoded"), heard.count("processed")) == (num_decoded, num_processed)


GRIDDED = ImageFacts(9, (), 8, GridRule(10, 400, 40_000))
TALL = PromptImage(1, 6, digest_of(png(1, 20, 30)), png(1, 20, 30), 3)  # three rows of two tokens


async def gridded(image: PromptImage, prompt: Sequence[int] = (1, *[9] * 6, 2)) -> Any:
    images = VllmImages(model(by_rule(), rule=GRIDDED.grid), GRIDDED)
    return await images.input_of(list(prompt), [image], "", lambda: False)


@pytest.mark.req("S129")
@pytest.mark.usefixtures("vllm_without_vllm")
async def test_a_decode_gets_the_rows_in_which_an_image_stands() -> None:
    """The decode gets the same rows that the prefill reads from the pixels, and nothing else."""
    pytest.importorskip("torch")
    (made,) = (await gridded(TALL)).items
    found = await gridded(replace(TALL, data=b""))
    (item,) = found.items
    assert set(item) == {GRID}
    assert (
        item[GRID].data.tolist() == made[GRID].data.tolist() == [1, 3 * MERGE_SIZE, 2 * MERGE_SIZE]
    )
    assert item[GRID].field.keep_on_cpu
    assert found.places == [Place(1, 6)]


@pytest.mark.req("S129")
@pytest.mark.usefixtures("vllm_without_vllm")
@pytest.mark.parametrize("is_prefill", [True, False])
async def test_an_image_without_rows_is_a_misfit_where_positions_depend_on_them(
    is_prefill: bool,
) -> None:
    data = TALL.data if is_prefill else b""
    with pytest.raises(ImageMisfit):
        await gridded(replace(TALL, num_rows=0, data=data))
    image = PromptImage(1, 2, TALL.digest, data, num_rows=1)
    with pytest.raises(ImageMisfit):
        await VllmImages(model(two), FACTS).input_of(PROMPT, [image], "", lambda: False)


@pytest.mark.req("S129")
@pytest.mark.usefixtures("vllm_without_vllm")
async def test_an_image_that_is_shown_on_its_side_is_refused() -> None:
    """The processor turned the image, so it has other rows than the gateway saw."""
    with pytest.raises(ImageUnusable, match="turn it"):
        await gridded(replace(TALL, num_rows=2))
    for num_tokens, num_rows in ((4, 2), (6, 1), (6, 6)):
        other = replace(TALL, num_tokens=num_tokens, num_rows=num_rows)
        with pytest.raises(ImageMisfit):
            await gridded(other, [1, *[9] * num_tokens, 2])


@pytest.mark.req("S129")
@pytest.mark.usefixtures("vllm_without_vllm")
@pytest.mark.parametrize("is_prefill", [True, False])
async def test_images_side_by_side_are_refused(is_prefill: bool) -> None:
    """Otherwise the step that computes the images would fail, and with it all requests of the
    engine.
    """
    data = TALL.data if is_prefill else b""
    two_images = [replace(TALL, data=data), replace(TALL, position=7, data=data)]
    images = VllmImages(model(by_rule(), rule=GRIDDED.grid), GRIDDED)
    with pytest.raises(ImageUnusable, match="side by side"):
        await images.input_of([1, *[9] * 12, 2], two_images, "", lambda: False)
    fixed_length = [PromptImage(at, 2, TALL.digest) for at in (1, 3)]
    prompt = [1, 9, 9, 9, 9]
    assert await VllmImages(model(two), FACTS).input_of(prompt, fixed_length, "", lambda: False)
