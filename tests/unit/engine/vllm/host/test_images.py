"""Which models' images the mesh serves, as their processor shows; and the inputs of a request."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from pdmesh.core.images.header import ImageHeader
from pdmesh.core.images.prompt_image import MAX_EXPANSION, ImageFacts, PromptImage, digest_of
from pdmesh.engine.vllm.config import MAX_IMAGES, VllmConfig
from pdmesh.engine.vllm.host import images
from pdmesh.engine.vllm.host.images import VllmImages, find_facts, opened
from pdmesh.errors import EngineFailed, ImageMisfit, ImageUnusable, MeshError
from tests.support.images.files import png, two_headers

pytest.importorskip("PIL")
Process = Callable[[int, tuple[int, int]], Sequence[int]]


@dataclass(frozen=True)
class Place:
    offset: int
    length: int


def model(process: Process, **config: Any) -> Any:
    """An engine whose processor puts `process(placeholder, size)` in place of an image."""

    def processed(prompt: list[int], data: dict[str, Any], *_: object) -> Any:
        (picture,), (placeholder,) = data["image"], prompt
        tokens = list(process(placeholder, picture.size))
        at = config.get("begins_at", 0)
        place = Place(at, len(tokens) - at)
        return {
            "prompt_token_ids": tokens,
            "mm_kwargs": {"image": [f"{picture.size} {threading.current_thread().name}"]},
            "mm_placeholders": {"image": [place]},
        }

    values = {"uses_mrope": False, "is_mm_prefix_lm": False, "model": "m", **config}
    values.setdefault("hf_config", Namespace(image_token_index=9))
    executor = ThreadPoolExecutor(1, "only")
    renderer = Namespace(_process_multimodal=processed, _mm_executor=executor)
    return Namespace(model_config=Namespace(**values), renderer=renderer)


def fixed(placeholder: int, _: tuple[int, int]) -> Sequence[int]:
    return [placeholder] * 16


def test_images_that_all_take_the_same_tokens_are_served() -> None:
    assert find_facts(model(fixed)) == ImageFacts(9, (9,) * 16, MAX_IMAGES)


def test_a_tag_may_be_another_token_than_those_of_an_image() -> None:
    def process(placeholder: int, _: tuple[int, int]) -> Sequence[int]:
        if placeholder != 5:
            raise ValueError("no such tag")
        return [5, 9, 9, 6]

    config = Namespace(image_token_id=9, boi_token_index=5)
    assert find_facts(model(process, hf_config=config)) == ImageFacts(5, (5, 9, 9, 6), MAX_IMAGES)


@pytest.mark.parametrize(
    ("process", "config"),
    [
        (lambda token, size: [token] * (size[0] // 10), {}),
        (lambda token, _: [token] * (MAX_EXPANSION + 1), {}),
        (lambda token, size: [token] * (5 if size == (1, 1) else 4), {}),
        (lambda token, size: [token] * (5 if max(size) > 100 * min(size) else 4), {}),
        (fixed, {"begins_at": 1}),
        (fixed, {"uses_mrope": True}),
        (fixed, {"is_mm_prefix_lm": True}),
        (fixed, {"hf_config": Namespace()}),
    ],
)
def test_other_models_serve_none(process: Process, config: dict[str, Any]) -> None:
    assert find_facts(model(process, **config)) is None


def test_a_processor_may_refuse_extreme_sizes() -> None:
    """Many cannot tell the channels of a single pixel. Such an image fails its own request."""

    def process(placeholder: int, size: tuple[int, int]) -> Sequence[int]:
        if size == (1, 1):
            raise ValueError("ambiguous")
        return fixed(placeholder, size)

    assert find_facts(model(process)) == ImageFacts(9, (9,) * 16, MAX_IMAGES)


@pytest.mark.parametrize(
    ("content", "expected"),
    [({"vision_config": {}}, True), ({"text_config": {}}, False), ([], False), (None, False)],
)
def test_a_model_that_reads_images_says_so(tmp_path: Path, content: Any, expected: bool) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(json.dumps(content))
    assert VllmConfig("p", 1, tmp_path, "m").has_vision is expected


@pytest.fixture
def vllm_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of vLLM that are used here: importing vLLM takes seconds."""

    def mm_input(prompt: list[int], items: Any, names: Any, places: Any, cache_salt: Any) -> Any:
        image = "image"
        return Namespace(items=items[image], names=names[image], places=places[image])

    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.inputs": {"mm_input": mm_input},
        "vllm.multimodal": {},
        "vllm.multimodal.inputs": {"PlaceholderRange": Place},
        "vllm.multimodal.image": {
            "normalize_image": lambda image: image,
            "convert_image_mode": lambda image, mode: image.convert(mode),
        },
    }
    for path, names in modules.items():
        module = ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, path, module)


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
    assert found.items == ["(8, 8) only_0", "(9, 9) only_0"]
    assert found.places == [Place(1, 2), Place(4, 2)]


@pytest.mark.usefixtures("vllm_without_vllm")
async def test_the_name_of_an_image_tells_the_tenants_apart() -> None:
    """Otherwise the time of an answer would tell which images another tenant sent."""
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
    real, heard = images.decoded, []

    def decode(data: bytes) -> Any:
        heard.append("decoded")
        return real(data)

    def process(placeholder: int, size: tuple[int, int]) -> Sequence[int]:
        heard.append("processed")
        return two(placeholder, size)

    monkeypatch.setattr(images, "decoded", decode)
    with pytest.raises(EngineFailed, match="given up"):
        await made(process, is_cancelled=lambda: next(answers))
    assert (heard.count("decoded"), heard.count("processed")) == (num_decoded, num_processed)


def test_a_size_that_is_not_the_headers_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the reader of headers overlooks."""
    from PIL import ImageFile

    def load(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(images, "read_header", lambda _: ImageHeader("png", 8, 9))
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(ImageUnusable, match="another size"):
        opened(png(1, 8, 8))
    monkeypatch.setattr(images, "read_header", lambda _: ImageHeader("gif", 8, 8))
    with pytest.raises(ImageUnusable, match="UnidentifiedImageError"):
        opened(png(1, 8, 8))


@pytest.mark.parametrize("data", [two_headers(300, 300), png(1, 201, 1), b"BM" + bytes(60)])
def test_a_prefill_checks_the_header_again(data: bytes) -> None:
    with pytest.raises(MeshError) as refused:
        opened(data)
    assert refused.value.reason == "IMAGE_UNUSABLE"


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_real_files_have_the_size_that_their_header_says(form: str) -> None:
    """With what files often hold before their pixels."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    text, out = PngInfo(), io.BytesIO()
    text.add_text("Comment", "x" * 1000)
    more: dict[str, dict[str, Any]] = {
        "PNG": {"pnginfo": text},
        "JPEG": {"progressive": True, "comment": b"y" * 5000},
        "WEBP": {"lossless": True, "exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"},
        "GIF": {"save_all": True, "append_images": [Image.new("RGB", (40, 30), "red")],
                "comment": b"z" * 1000},
    }  # fmt: skip
    Image.new("RGB", (40, 30), "blue").save(out, form, **more[form])
    assert opened(out.getvalue()).size == (40, 30)
