"""Which models' images the mesh serves, as their processor shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from pdmesh.core.images.prompt_image import MAX_EXPANSION, ImageFacts
from pdmesh.engine.vllm.config import MAX_IMAGES, VllmConfig
from pdmesh.engine.vllm.host.images import find_facts

pytest.importorskip("PIL")
Process = Callable[[int, tuple[int, int]], Sequence[int]]


def model(process: Process, **config: Any) -> Any:
    """An engine whose processor puts `process(placeholder, size)` in place of an image."""

    def processed(prompt: list[int], data: dict[str, Any], *_: object) -> Any:
        (picture,), (placeholder,) = data["image"], prompt
        tokens = list(process(placeholder, picture.size))
        at = config.get("begins_at", 0)
        place = Namespace(offset=at, length=len(tokens) - at)
        return {"prompt_token_ids": tokens, "mm_placeholders": {"image": [place]}}

    values = {"uses_mrope": False, "is_mm_prefix_lm": False, "model": "m", **config}
    values.setdefault("hf_config", Namespace(image_token_index=9))
    return Namespace(
        model_config=Namespace(**values), renderer=Namespace(_process_multimodal=processed)
    )


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
        (fixed, {"begins_at": 1}),
        (fixed, {"uses_mrope": True}),
        (fixed, {"is_mm_prefix_lm": True}),
        (fixed, {"hf_config": Namespace()}),
    ],
)
def test_other_models_serve_none(process: Process, config: dict[str, Any]) -> None:
    assert find_facts(model(process, **config)) is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [({"vision_config": {}}, True), ({"text_config": {}}, False), ([], False), (None, False)],
)
def test_a_model_that_reads_images_says_so(tmp_path: Path, content: Any, expected: bool) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(json.dumps(content))
    assert VllmConfig("p", 1, tmp_path, "m").has_vision is expected
