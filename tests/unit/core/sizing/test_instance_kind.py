"""The memory that a model leaves for KV, and models that do not fit."""

from __future__ import annotations

import pytest

from loadtests.sizing.scenes import CONFIGS
from pdmesh.core.sizing.accelerators import accelerator
from pdmesh.core.sizing.instance_kind import kind_of, kinds_of
from pdmesh.core.sizing.model_shape import model_shape
from pdmesh.core.sizing.problem import SizingProblem
from tests.unit.core.sizing.test_model_shape import DEEPSEEK_V3

LARGE = model_shape(CONFIGS["Llama-3.1-70B"])


def test_kv_takes_what_weights_and_workspace_leave() -> None:
    kind = kind_of(LARGE, accelerator("h100"), 4)
    assert kind is not None
    left = 0.9 * 81_559 * 2**20 - 3 * 2**30 - LARGE.weight_bytes / 4
    assert kind.kv_bytes == pytest.approx(left)
    assert kind.kv_tokens == pytest.approx(left / (LARGE.kv_token_bytes / 4), abs=1)
    assert kind.network_bandwidth == 4 * 50e9


def test_only_sizes_that_fit_are_offered() -> None:
    assert [kind.tp for kind in kinds_of(LARGE, accelerator("h100"), (1, 2, 4, 8))] == [2, 4, 8]


def test_latent_kv_is_whole_on_every_rank() -> None:
    shape = model_shape(DEEPSEEK_V3)
    kind = kind_of(shape, accelerator("h200"), 8)
    assert kind is not None
    assert kind.kv_tokens == int(kind.kv_bytes / shape.kv_token_bytes)


def test_a_model_that_does_not_fit_says_by_how_much_and_what_would() -> None:
    with pytest.raises(SizingProblem, match=r"131 GiB do not fit 1 x h100: 62\..*--tp 2 fits"):
        kinds_of(LARGE, accelerator("h100"), (1,))
    with pytest.raises(SizingProblem, match="32 devices would have the room, which is more than"):
        kinds_of(LARGE, accelerator("custom:l4,memory_gib=9"), (1, 8))
    with pytest.raises(SizingProblem, match="no number of devices up to 32"):
        kinds_of(model_shape(DEEPSEEK_V3), accelerator("l4"), (8,))
