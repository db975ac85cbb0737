"""Models that keep other data than KV per token are refused. The error names these data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.engine.vllm.model.cache_kinds import check_cache_kinds, may_reuse_prefixes, without_kv
from pdmesh.errors import EngineMisconfigured


def model(**facts: object) -> Any:  # the Any stands for vLLM's ModelConfig
    usual: dict[str, object] = {
        "served_model_name": "m",
        "has_inner_state": False,
        "is_attention_free": False,
        "is_encoder_decoder": False,
        "hf_text_config": SimpleNamespace(),
    }
    return SimpleNamespace(**(usual | facts))


@pytest.mark.parametrize("kinds", [None, ["full_attention", "sliding_attention"]])
def test_layers_that_see_all_tokens_or_a_window_of_them_keep_kv(kinds: object) -> None:
    check_cache_kinds(
        model(hf_text_config=SimpleNamespace(layer_types=kinds)), reuses_prefixes=True
    )


LINEAR = {
    "has_inner_state": True,
    "hf_text_config": SimpleNamespace(layer_types=["linear_attention", "full_attention"]),
}
CONVOLUTIONS = {
    "has_inner_state": True,
    "hf_text_config": SimpleNamespace(layer_types=["conv", "full_attention"]),
}


@pytest.mark.parametrize(
    ("facts", "feature"),
    [
        ({"is_attention_free": True, "has_inner_state": True}, "state-space layers alone"),
        ({"is_encoder_decoder": True}, "cross attention"),
    ],
)
def test_a_model_whose_blocks_nothing_names_is_refused_in_a_line_that_names_it(
    facts: dict[str, object], feature: str
) -> None:
    assert without_kv(model(**facts)) == feature
    with pytest.raises(
        EngineMisconfigured, match=rf"^m has {feature}: .*docs/cache-kinds\.md"
    ) as caught:
        check_cache_kinds(model(**facts), reuses_prefixes=True)
    assert caught.value.reason == "MODEL_UNSUPPORTED"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "feature"),
    [
        (LINEAR, "linear attention"),
        (CONVOLUTIONS, "short convolutions"),
        ({"has_inner_state": True}, "state-space layers"),
    ],
)
def test_states_beside_attention_move_but_tiers_keep_none(
    facts: dict[str, object], feature: str
) -> None:
    check_cache_kinds(model(**facts), reuses_prefixes=True)
    with pytest.raises(
        EngineMisconfigured, match=f"^m has {feature}, and tiers keep no states: set kv_host_pool_"
    ) as caught:
        check_cache_kinds(model(**facts), reuses_prefixes=True, has_tiers=True)
    assert caught.value.reason == "MODEL_UNSUPPORTED"
    check_cache_kinds(model(), reuses_prefixes=True, has_tiers=True)


def test_layers_that_use_the_kv_of_others_are_refused_and_a_model_that_could_have_some_is_not() -> (
    None
):
    """Gemma 3n has such layers. Other models of its family may have none."""
    check_cache_kinds(
        model(hf_text_config=SimpleNamespace(num_kv_shared_layers=0)), reuses_prefixes=True
    )
    shares = model(hf_text_config=SimpleNamespace(num_kv_shared_layers=15))
    with pytest.raises(EngineMisconfigured, match=r"^m has layers that use the KV of o") as told:
        check_cache_kinds(shares, reuses_prefixes=True)
    assert told.value.reason == "MODEL_UNSUPPORTED"


def test_kv_that_depends_on_more_than_the_tokens_before_it_is_not_moved() -> None:
    """For such a model (prefix LM, R-SWA), vLLM switches prefix caching off."""
    with pytest.raises(
        EngineMisconfigured, match="depends on more than the tokens before it"
    ) as caught:
        check_cache_kinds(model(), reuses_prefixes=False)
    assert caught.value.reason == "MODEL_UNSUPPORTED"


@pytest.mark.parametrize(
    ("use_mla", "device", "caches", "may"),
    [
        (False, "cpu", True, True),
        (False, "cpu", False, False),
        (True, "cpu", False, True),  # the kernel forbids prefix caching here, not the model
        (True, "cuda", False, False),
    ],
)
def test_prefixes_of_latents_may_be_used_again_where_only_the_kernel_for_cpus_forbids_it(
    use_mla: bool, device: str, caches: bool, may: bool
) -> None:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=use_mla),
        device_config=SimpleNamespace(device_type=device),
        cache_config=SimpleNamespace(enable_prefix_caching=caches),
    )
    assert may_reuse_prefixes(config) is may
