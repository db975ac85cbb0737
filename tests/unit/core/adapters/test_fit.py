"""An adapter is used only with a model that it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pdmesh.core.adapters.fit import AdapterFacts, misfit

Q, V = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
BASE = {f"{Q}.weight": (96, 64), f"{V}.weight": (32, 64)}
SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def facts(shapes: Mapping[str, tuple[int, ...]] | None = None, **settings: object) -> AdapterFacts:
    found = {
        f"base_model.model.{Q}.lora_A.weight": (4, 64),
        f"base_model.model.{Q}.lora_B.weight": (96, 4),
        f"base_model.model.{V}.lora_A.weight": (2, 64),
        f"base_model.model.{V}.lora_B.weight": (32, 2),
    }
    return AdapterFacts("d", 1, SETTINGS | settings, found | dict(shapes or {}))


def test_one_of_the_model_fits() -> None:
    assert misfit(facts(), 8, BASE) == ""
    assert facts().rank == 4


def test_one_of_a_quantised_model_is_not_compared_with_it() -> None:
    assert misfit(facts({f"base_model.model.{Q}.lora_B.weight": (7, 4)}), 8, None) == ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"r": 0}, "positive"),
        ({"r": "4"}, "positive"),
        ({"lora_alpha": True}, "positive"),
    ],
)
def test_settings_that_no_engine_honours_are_refused(settings: Any, said: str) -> None:
    assert said in misfit(facts(**settings), 8, BASE)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({f"base_model.model.{Q}.lora_B.weight": (95, 4)}, "[96, 64] in the model, and [95, 64]"),
        ({f"base_model.model.{Q}.lora_A.weight": (4, 65)}, "and [96, 65] in the adapter"),
        ({f"base_model.model.{Q}.lora_A.weight": (3, 64)}, "do not fit together"),
        ({f"base_model.model.{Q}.lora_A.weight": (4,)}, "do not fit together"),
        ({f"base_model.model.{Q}x.lora_A.weight": (4, 64)}, "q_projx lacks lora_B"),
        (
            {
                "base_model.model.other.lora_A.weight": (4, 64),
                "base_model.model.other.lora_B.weight": (64, 4),
            },
            "no layer other",
        ),
        ({"base_model.model.embed.lora_embedding_A": (4, 64)}, "no part of a LoRA adapter"),
        ({"lm_head.weight": (64, 64)}, "no part of a LoRA adapter"),
    ],
)
def test_tensors_of_another_model_are_refused(shapes: Any, said: str) -> None:
    assert said in misfit(facts(shapes), 8, BASE)


def test_a_rank_above_the_engines_is_refused() -> None:
    assert "rank 4; the highest here is 2" in misfit(facts(), 2, BASE)


def test_one_without_tensors_is_refused() -> None:
    assert misfit(AdapterFacts("d", 1, SETTINGS, {}), 8, BASE) == "it has no tensors"
