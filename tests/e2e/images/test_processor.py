"""Images are read and processed as by plain vLLM, which is vLLM without the mesh.

The tests start no engine.
"""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from pdmesh.core.images.prompt_image import ImageFacts, PromptImage, digest_of
from pdmesh.engine.vllm.config import MAX_IMAGES
from pdmesh.engine.vllm.images.facts import find_facts
from pdmesh.engine.vllm.images.inputs import VllmImages
from pdmesh.engine.vllm.images.processing import decoded
from pdmesh.errors import ImageUnusable
from tests.e2e.images import tiny_qwen2_vl
from tests.e2e.images.tiny_llava import IMAGE, NUM_IMAGE_TOKENS, write_tiny_llava
from tests.e2e.images.tiny_qwen2_vl import write_tiny_qwen2_vl

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
]
ROWS = ImageFacts(tiny_qwen2_vl.IMAGE, (), MAX_IMAGES, tiny_qwen2_vl.RULE)
EXPANSION = (IMAGE,) * NUM_IMAGE_TOKENS


def file(mode: str, form: str, size: tuple[int, int] = (60, 40), **save: Any) -> bytes:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(1).integers(0, 255, (size[1], size[0], 4), dtype=np.uint8)
    out = io.BytesIO()
    picture = Image.fromarray(pixels, "RGBA")
    picture = picture.quantize(16) if mode == "P" else picture.convert(mode)
    picture.save(out, form, **save)
    return out.getvalue()


def turned() -> bytes:
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    return file("RGB", "JPEG", exif=exif)


def files() -> list[bytes]:
    other = file("RGB", "PNG", (60, 40))
    from PIL import Image

    return [
        *(file(mode, "PNG") for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")),
        file("P", "PNG", transparency=3), file("RGB", "PNG", transparency=(1, 2, 3)),
        *(file(mode, "JPEG") for mode in ("RGB", "L", "CMYK")), turned(),
        file("RGB", "JPEG", progressive=True),
        file("RGB", "WEBP"), file("RGBA", "WEBP"), file("RGBA", "WEBP", lossless=True),
        file("P", "GIF"), file("P", "GIF", transparency=3),
        file("RGB", "GIF", save_all=True, append_images=[Image.open(io.BytesIO(other))]),
        file("RGB", "WEBP", save_all=True, append_images=[Image.open(io.BytesIO(other))]),
    ]  # fmt: skip


@pytest.mark.req("S128")
def test_each_kind_of_file_is_decoded_as_vllm_does() -> None:
    from vllm.multimodal.media.image import ImageMediaIO

    for at, data in enumerate(files()):
        expected, found = ImageMediaIO().load_bytes(data).media, decoded(data)
        assert (found.mode, found.size) == (expected.mode, expected.size), at
        assert found.tobytes() == expected.tobytes(), at


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return processing(write_tiny_llava(tmp_path_factory.mktemp("models") / "llava"))


def processing(folder: Path, **arguments: Any) -> Any:
    """The parts of an engine that the processor needs."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers.registry import renderer_from_config

    config = EngineArgs(
        str(folder),
        model_impl="transformers",
        max_model_len=1024,
        mm_processor_cache_gb=0,
        dtype="float32",
        enforce_eager=True,
        **arguments,
    ).create_engine_config()
    renderer = renderer_from_config(config)
    return Namespace(model_config=config.model_config, renderer=renderer)


def test_extreme_sizes_take_the_same_tokens(llm: Any) -> None:
    facts = find_facts(llm)
    assert facts is not None
    assert facts.expansion == EXPANSION


@pytest.mark.req("S129")
def test_a_model_with_mrope_confirms_its_rule(tmp_path: Path) -> None:
    qwen2_vl = processing(write_tiny_qwen2_vl(tmp_path / "qwen2-vl"), trust_remote_code=True)
    assert find_facts(qwen2_vl) == ROWS


@pytest.mark.req("S128")
async def test_images_alone_become_what_they_become_together(llm: Any) -> None:
    """vLLM processes all images of a prompt in one call. The mesh processes each image alone."""
    import torch

    data = [*files(), file("RGB", "PNG", (500, 4)), file("RGB", "PNG", (60, 60))]
    prompt, images = [7], []
    for each in data:
        images.append(PromptImage(len(prompt), NUM_IMAGE_TOKENS, digest_of(each), each))
        prompt += [*EXPANSION, len(images)]
    short = [7, *(token for at in range(len(data)) for token in (IMAGE, at + 1))]
    llm.renderer.model_config.multimodal_config.limit_per_prompt = {}
    together = llm.renderer._process_multimodal(
        short, {"image": [decoded(each) for each in data]}, None, None
    )
    assert together["prompt_token_ids"] == prompt
    made = await VllmImages(llm, ImageFacts(IMAGE, EXPANSION, 8)).input_of(
        prompt, images, "", lambda: False
    )
    assert made["prompt_token_ids"] == prompt
    assert made["mm_placeholders"]["image"] == list(together["mm_placeholders"]["image"])
    pairs = zip(made["mm_kwargs"]["image"], together["mm_kwargs"]["image"], strict=True)
    for at, (alone, among) in enumerate(pairs):
        one, other = alone.get_data(), among.get_data()
        assert one.keys() == other.keys(), at
        assert all(torch.equal(one[key], other[key]) for key in one), at


async def test_pixels_that_the_processor_refuses_fail_the_request_only(llm: Any) -> None:
    images = VllmImages(llm, ImageFacts(IMAGE, EXPANSION, 8))
    whole = file("RGB", "PNG")
    for data in (whole[: len(whole) // 2], file("RGB", "PNG", (2010, 10))):
        image = PromptImage(0, NUM_IMAGE_TOKENS, digest_of(data), data)
        with pytest.raises(ImageUnusable):
            await images.input_of(list(EXPANSION), [image], "", lambda: False)
