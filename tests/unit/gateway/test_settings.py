"""The checks of a gateway's settings."""

from __future__ import annotations

import pytest
from pydantic import SecretStr, ValidationError

from pdmesh.config import BadSetting
from pdmesh.services.gateway.settings import Settings


@pytest.mark.parametrize("host", ["https://example.org", "*.example.org", "[::1]", "", "a.org/b"])
def test_a_host_of_images_that_could_never_match_is_refused(host: str) -> None:
    with pytest.raises(ValidationError, match="image_hosts"):
        Settings(image_hosts=[host])


def test_hosts_of_images_may_have_a_port_and_capitals() -> None:
    rules = Settings(image_hosts=["Example.org", "example.org:8443"]).image_rules
    assert rules.hosts == {"example.org", "example.org:8443"}


def test_a_number_of_a_scenario_is_not_true_or_false(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise `true` would count as one second."""
    monkeypatch.setenv("PDMESH_GATEWAY_SCENARIOS", '{"chat": {"ttft_s": true}}')
    with pytest.raises(BadSetting, match=r"_SCENARIOS: chat\.ttft_s: must not be true or false"):
        Settings.load()


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        ('{"scenario": "a", "max_uncached_tokens": -1}', r"max_uncached_tokens: .*greater than"),
        (
            '{"scenario": "a", "max_prompt_tokens": 100, "max_uncached_tokens": 100}',
            r"max_uncached_tokens: must be less than max_prompt_tokens",
        ),
        (
            '{"scenario": "a", "min_prompt_tokens": 9, "max_prompt_tokens": 8}',
            r"max_prompt_tokens: must be 0 or at least min_prompt_tokens",
        ),
        ('{"scenario": "a", "min_uncached_tokens": 9}', r"min_uncached_tokens: "),
    ],
)
def test_an_error_in_a_rule_names_the_rule_and_its_field(
    monkeypatch: pytest.MonkeyPatch, rule: str, error: str
) -> None:
    monkeypatch.setenv("PDMESH_GATEWAY_SCENARIO_RULES", f'[{{"scenario": "ok"}}, {rule}]')
    with pytest.raises(BadSetting, match=rf"_SCENARIO_RULES: 1\.{error}"):
        Settings.load()


def test_plans_are_not_signed_with_a_secret_that_everybody_knows() -> None:
    assert "PDMESH_HASH_SECRET" in Settings(host="0.0.0.0", picker_port=8002).why_no_picker
    assert not Settings(host="127.0.0.1", picker_port=8002).why_no_picker
    own = Settings(host="0.0.0.0", picker_port=8002, hash_secret=SecretStr("own"))
    assert not own.why_no_picker
