"""Tests whether the mesh serves a model's images, decided by trying the model's image processor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from pdmesh.core.images.prompt_image import MAX_EXPANSION, ImageFacts
from pdmesh.core.images.token_grid import GridRule
from pdmesh.engine.vllm.config import MAX_IMAGES, VllmConfig
from pdmesh.engine.vllm.images.facts import find_facts
from tests.support.images.model import IMAGE_TOKEN, RULE, Process, by_rule, fixed, model

pytest.importorskip("PIL")


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
    """Many processors cannot find the colour channels of a single pixel. Such an image fails only
    its own request.
    """

    def process(placeholder: int, size: tuple[int, int]) -> Sequence[int]:
        if size == (1, 1):
            raise ValueError("ambiguous")
        return fixed(placeholder, size)

    assert find_facts(model(process)) == ImageFacts(9, (9,) * 16, MAX_IMAGES)


@pytest.mark.req("S129")
def test_a_model_with_mrope_may_resize_images_as_qwen2_vl_does() -> None:
    expected = ImageFacts(IMAGE_TOKEN, (), MAX_IMAGES, RULE)
    assert find_facts(model(by_rule(), rule=RULE)) == expected


def _only_small(placeholder: int, size: tuple[int, int]) -> Sequence[int]:
    if size[0] == size[1] > 200:
        raise ValueError("too large")
    return by_rule()(placeholder, size)


def _other_tokens(placeholder: int, size: tuple[int, int]) -> Sequence[int]:
    return [placeholder + 1] * len(by_rule()(placeholder, size))


@pytest.mark.req("S129")
@pytest.mark.parametrize(
    ("process", "config"),
    [
        (by_rule(replace(RULE, max_pixels=20_000)), {}),  # shows only with a large image
        (by_rule(replace(RULE, min_pixels=900)), {}),  # shows only with a small image
        (by_rule(replace(RULE, factor=12)), {}),
        (by_rule(), {"begins_at": 1}),
        (by_rule(), {"hf_config": Namespace(image_token_id=IMAGE_TOKEN)}),
        (by_rule(), {"hf_config": Namespace(vision_config=Namespace(spatial_merge_size=2))}),
        (
            by_rule(),  # merges the patches into other rows than the tokens have
            {
                "hf_config": Namespace(
                    image_token_id=9, vision_config=Namespace(spatial_merge_size=4)
                )
            },
        ),
        (by_rule(), {"is_mm_prefix_lm": True}),
        (_only_small, {}),
        (_other_tokens, {}),
    ],
)
def test_other_models_with_mrope_serve_none(process: Process, config: dict[str, Any]) -> None:
    assert find_facts(model(process, rule=RULE, **config)) is None


def test_an_image_with_more_tokens_than_a_prompt_may_have_is_not_served() -> None:
    rule = GridRule(2, 4, 4 * (MAX_EXPANSION + 1))
    assert find_facts(model(by_rule(rule), rule=rule)) is None
    rule = replace(rule, max_pixels=4 * MAX_EXPANSION)
    assert find_facts(model(by_rule(rule), rule=rule)) is not None


def test_a_processor_that_says_nothing_of_sizes_is_not_served() -> None:
    engine = model(by_rule(), rule=RULE)
    engine.renderer.get_mm_processor = lambda: Namespace(
        info=Namespace(get_hf_processor=lambda: Namespace(image_processor=Namespace(size={})))
    )
    assert find_facts(engine) is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [({"vision_config": {}}, True), ({"text_config": {}}, False), ([], False), (None, False)],
)
def test_a_model_that_reads_images_says_so(tmp_path: Path, content: Any, expected: bool) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(json.dumps(content))
    assert VllmConfig("p", 1, tmp_path, "m").has_vision is expected
