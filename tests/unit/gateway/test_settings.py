"""The settings of a gateway."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

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
    """`true` would be one second."""
    monkeypatch.setenv("PDMESH_GATEWAY_SCENARIOS", '{"chat": {"ttft_s": true}}')
    with pytest.raises(BadSetting, match=r"_SCENARIOS: chat\.ttft_s: must not be true or false"):
        Settings.load()
