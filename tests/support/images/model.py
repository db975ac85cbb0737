"""Fakes of the parts of a vLLM engine that process images. They do not import vLLM."""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from pdmesh.core.images.token_grid import GridRule
from pdmesh.engine.vllm.images.processing import GRID

Process = Callable[[int, tuple[int, int]], Sequence[int]]
IMAGE_TOKEN = 9
MERGE_SIZE = 2  # a token stands for a square of MERGE_SIZE x MERGE_SIZE patches
RULE = GridRule(10, 400, 40_000)


@dataclass(frozen=True)
class Place:
    offset: int
    length: int


def model(process: Process, **config: Any) -> Any:
    """An engine whose processor replaces an image by the tokens `process(placeholder, size)`."""

    def processed(prompt: list[int], data: dict[str, Any], *_: object) -> Any:
        (picture,), (placeholder,) = data["image"], prompt
        tokens = list(process(placeholder, picture.size))
        at = config.get("begins_at", 0)
        item = {"size": picture.size, "thread": threading.current_thread().name}
        if rule is not None:
            rows, columns = rule.grid_of(*picture.size)
            patches = array("q", [1, rows * MERGE_SIZE, columns * MERGE_SIZE])
            item[GRID] = Namespace(data=patches)
        return {
            "prompt_token_ids": tokens,
            "mm_kwargs": {"image": [item]},
            "mm_placeholders": {"image": [Place(at, len(tokens) - at)]},
        }

    rule: GridRule | None = config.pop("rule", None)
    values = {"uses_mrope": rule is not None, "is_mm_prefix_lm": False, "model": "m", **config}
    vision = Namespace(spatial_merge_size=MERGE_SIZE)
    values.setdefault("hf_config", Namespace(image_token_id=IMAGE_TOKEN, vision_config=vision))
    executor = ThreadPoolExecutor(1, "only")
    said = Namespace(image_processor=_processor_of(rule) if rule is not None else None)
    renderer = Namespace(
        _process_multimodal=processed,
        _mm_executor=executor,
        get_mm_processor=lambda: Namespace(info=Namespace(get_hf_processor=lambda: said)),
    )
    return Namespace(model_config=Namespace(**values), renderer=renderer)


def _processor_of(rule: GridRule) -> Any:
    size = {"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels}
    return Namespace(patch_size=rule.factor // MERGE_SIZE, merge_size=MERGE_SIZE, size=size)


def by_rule(rule: GridRule = RULE) -> Process:
    """A processor that makes as many tokens as the rule says."""

    def process(placeholder: int, size: tuple[int, int]) -> Sequence[int]:
        rows, columns = rule.grid_of(*size)
        return [placeholder] * (rows * columns)

    return process


def fixed(placeholder: int, _: tuple[int, int]) -> Sequence[int]:
    return [placeholder] * 16


@pytest.fixture
def vllm_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the names in vLLM that requests with images need, because importing vLLM takes
    seconds.
    """

    def mm_input(prompt: list[int], items: Any, names: Any, places: Any, cache_salt: Any) -> Any:
        image = "image"
        return Namespace(items=items[image], names=names[image], places=places[image])

    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.inputs": {"mm_input": mm_input},
        "vllm.multimodal": {},
        "vllm.multimodal.inputs": {
            "PlaceholderRange": Place,
            "MultiModalBatchedField": Namespace,
            "MultiModalFieldElem": lambda data, field: Namespace(data=data, field=field),
            "MultiModalKwargsItem": dict,
        },
        "vllm.multimodal.image": {
            "normalize_image": lambda image: image,
            "convert_image_mode": lambda image, mode: image.convert(mode),
        },
    }
    for path, names in modules.items():
        module = ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, path, module)
