"""An adapter is accepted only with a model that it was made for."""

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


def test_an_adapter_of_the_model_fits() -> None:
    assert misfit(facts(), 8, BASE) == ""
    assert facts().rank == 4


def test_the_shapes_of_an_adapter_are_not_compared_with_a_quantised_model() -> None:
    assert misfit(facts({f"base_model.model.{Q}.lora_B.weight": (7, 4)}), 8, None) == ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"r": 0}, "r must be a positive integer"),
        ({"r": "4"}, "r must be a positive integer"),
        ({"r": 4.5}, "r must be a positive integer"),
        ({"r": 9}, "r is 9; the highest rank here is 8 (MAX_LORA_RANK)"),
        ({"rank_pattern": {"q_proj": 16}}, "rank_pattern.q_proj is 16; the highest"),
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern must give a positive integer"),
        ({"rank_pattern": [2]}, "rank_pattern must give a positive integer"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern must give a positive number"),
        ({"lora_alpha": True}, "lora_alpha must be a positive number"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"init_lora_weights": "PiSSA_niter_16"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"init_lora_weights": "corda"}, "init_lora_weights"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": ["q_proj", 3]}, "target_modules"),
        ({"target_modules": {"q_proj": 1}}, "target_modules"),
    ],
)
def test_settings_that_no_engine_honours_are_refused(settings: Any, said: str) -> None:
    why = misfit(facts(**settings), 8, BASE)
    assert why.startswith("adapter_config.json: ")
    assert said in why


@pytest.mark.parametrize(
    "settings",
    [
        {"init_lora_weights": True},
        {"init_lora_weights": "Gaussian"},
        {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 4.0}},
        {"rank_pattern": None, "modules_to_save": None, "layer_replication": None},
        {"target_modules": "all-linear", "use_rslora": True},
    ],
)
def test_supported_settings_are_accepted(settings: Any) -> None:
    assert misfit(facts(**settings), 8, BASE) == ""


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
        ({"base_model.model.model.embed_tokens.lora_A.weight": (4, 64)}, "no part of a LoRA"),
    ],
)
def test_tensors_of_another_model_are_refused(shapes: Any, said: str) -> None:
    assert said in misfit(facts(shapes), 8, BASE)


def test_a_rank_above_the_highest_of_the_engine_is_refused() -> None:
    assert "r is 4; the highest rank here is 2" in misfit(facts(), 2, BASE)
    assert "rank 4; the highest here is 2" in misfit(facts(r=2), 2, BASE)


def test_an_adapter_without_tensors_is_refused() -> None:
    assert misfit(AdapterFacts("d", 1, SETTINGS, {}), 8, BASE) == "it has no tensors"
