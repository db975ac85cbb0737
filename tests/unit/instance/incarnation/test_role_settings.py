"""Tests how the role of an instance changes the instance's settings."""

from __future__ import annotations

from typing import Any

import pytest

from pdmesh.core.loading.weights_loader import WeightsLoader
from pdmesh.core.model import Role, RoleSpec
from pdmesh.core.speculation.proposal_length import NO_SPECULATION, Method, Speculation
from pdmesh.engine.base import EngineInfo
from pdmesh.engine.factory import BuiltEngine, build_engine
from pdmesh.errors import EngineMisconfigured
from pdmesh.instance.incarnation.role_settings import (
    RoleRefused,
    capacity_of,
    engine_settings,
    settings_for,
)
from pdmesh.instance.settings import InstanceSettings

INFO = EngineInfo("sim", "m", "f", 64, 1000, 4096, 2048)
ENGINE: Any = None  # the engine is not used here


@pytest.mark.req("S40", "S53")
@pytest.mark.parametrize(
    ("role", "num_waiting"), [(Role.PREFILL, 0), (Role.FUSION, 0), (Role.DECODE, 3)]
)
def test_only_a_decode_accepts_more_requests_than_it_has_slots(
    role: Role, num_waiting: int
) -> None:
    """A prefill refuses a prompt that would have to wait, because another prefill may be idle."""
    settings = InstanceSettings(num_slots=4, max_waiting=3)
    capacity = capacity_of(settings, role, BuiltEngine(ENGINE, 1 << 20, 1 << 20), INFO)
    assert (capacity.num_slots, capacity.max_waiting) == (4, num_waiting)


@pytest.mark.req("S119", "S120")
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.FUSION])
def test_an_assignment_says_how_an_engine_is_divided(role: Role) -> None:
    options = (("tensor_parallel_size", "4"), ("pipeline_parallel_size", "2"))
    spec = RoleSpec(role, "default", "default", options=options)
    found = engine_settings(settings_for(InstanceSettings(), spec, {}), role, 1)
    assert (found.tensor_parallel_size, found.pipeline_parallel_size) == (4, 2)


@pytest.mark.req("S120")
@pytest.mark.parametrize("role", [Role.POOLING, Role.ENCODER])
def test_only_instances_that_generate_are_pipelines(role: Role) -> None:
    given = InstanceSettings(pipeline_parallel_size=2)
    with pytest.raises(EngineMisconfigured, match="only instances that generate") as refused:
        build_engine(engine_settings(given, role, 1))
    assert refused.value.field == "pipeline_parallel_size"


def assigned(text: str, role: Role = Role.DECODE, **settings: Any) -> Speculation:
    """The engine's speculation if the master assigns this option to an instance of this role."""
    spec = RoleSpec(role, "g", "s", options=(("speculation", text),))
    given = settings_for(InstanceSettings(**settings), spec, {})
    return engine_settings(given, role, 1).speculation


@pytest.mark.req("S84")
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.FUSION, Role.POOLING])
def test_a_role_change_keeps_the_weights_loader_unless_the_assignment_names_one(role: Role) -> None:
    own = InstanceSettings(weights_loader=WeightsLoader.FILE_ORDER)
    named = RoleSpec(role, "g", "s", options=(("weights_loader", "vllm"),))
    got = [
        engine_settings(settings_for(own, spec, {}), role, 1).weights_loader
        for spec in (RoleSpec(role, "g", "s"), named)
    ]
    assert got == [WeightsLoader.FILE_ORDER, WeightsLoader.VLLM]


@pytest.mark.req("S67", "S118")
def test_an_assignment_chooses_how_a_decode_speculates() -> None:
    got = assigned('{"method": "prompt_lookup", "k": "3"}', speculative_acceptance=0.5)
    assert got == Speculation(3, 0.5, 0.01)
    fixed = assigned('{"method": "suffix", "schedule": "fixed"}')
    assert (fixed.method, fixed.max_tokens, fixed.is_fixed) == (Method.SUFFIX, 4, True)
    draft = assigned('{"method": "draft_model", "model": "/models/small"}')
    assert (draft.method, draft.model) == (Method.DRAFT_MODEL, "/models/small")
    assert assigned('{"method": "none"}') == NO_SPECULATION


@pytest.mark.req("S67")
def test_a_prefill_does_not_speculate() -> None:
    text = '{"method": "prompt_lookup"}'
    assert assigned(text, Role.PREFILL) == NO_SPECULATION
    assert assigned(text, Role.FUSION).max_tokens == 4


@pytest.mark.req("S67", "S113")
def test_a_prefill_computes_the_draft_models_kv() -> None:
    text = '{"method": "draft_model", "model": "/models/small"}'
    prefill, decode = (assigned(text, role) for role in (Role.PREFILL, Role.DECODE))
    assert (prefill.method, prefill.model) == (decode.method, decode.model)
    assert (prefill.max_tokens, decode.max_tokens) == (1, 4)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"method": "guess"}', "speculation.method"),
        ('{"k": 4}', "speculation.method"),
        ('{"method": "prompt_lookup", "k": 0}', "speculation.k"),
        ('{"method": "prompt_lookup", "k": "many"}', "speculation.k"),
        ('{"method": "prompt_lookup", "k": true}', "speculation.k"),
        ('{"method": true}', "speculation.method"),
        ('{"method": "prompt_lookup", "schedule": "x"}', "speculation.schedule"),
        ('{"method": "prompt_lookup", "tokens": 3}', "speculation.tokens"),
        ('{"method": "prompt_lookup", "model": "/m"}', "speculation"),
        ('{"method": "eagle"}', "speculation"),
        ("4", "speculation"),
        ("{", "speculation"),
        ("[" * 5000, "speculation"),
        ("[" * 100_000, "speculation"),
    ],
)
def test_a_bad_speculation_names_its_field(text: str, field: str) -> None:
    with pytest.raises(RoleRefused) as refused:
        assigned(text)
    assert (refused.value.field, refused.value.reason) == (field, "BAD_OPTION")
    assert len(refused.value.message) < 300


def test_speculation_is_given_in_one_way_only() -> None:
    with pytest.raises(RoleRefused) as refused:
        assigned('{"method": "prompt_lookup"}', speculative_tokens=4)
    assert refused.value.field == "speculation"
    assert "speculative_tokens" in refused.value.message
    given = InstanceSettings(speculative_tokens=2)
    assert engine_settings(given, Role.DECODE, 1).speculation == Speculation(2, 0.6, 0.01)


def test_the_environment_has_it_as_json_or_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_SPECULATION", '{"method": "prompt_lookup", "k": 5}')
    option = InstanceSettings.load().speculation
    assert option is not None
    assert (option.method, option.k, option.schedule) == ("prompt_lookup", 5, "adaptive")
