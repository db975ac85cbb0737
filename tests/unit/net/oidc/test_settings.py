"""The settings of an OpenID provider are checked when a process starts."""

from __future__ import annotations

import pytest

from pdmesh.config import BadSetting
from pdmesh.core.access.operator_roles import AdminRole
from pdmesh.services.gateway.settings import Settings as GatewaySettings
from pdmesh.services.master_scheduler.settings import Settings as MasterSettings

GOOD = {
    "PDMESH_OIDC_ISSUER": "https://id.example.org/realms/mesh",
    "PDMESH_OIDC_AUDIENCE": "pdmesh",
}


def load(monkeypatch: pytest.MonkeyPatch, **more: str) -> GatewaySettings:
    for name, value in {**GOOD, **more}.items():
        monkeypatch.setenv(name, value)
    return GatewaySettings.load()


def test_without_an_issuer_no_tokens_are_taken() -> None:
    assert GatewaySettings().token_verifier() is None
    assert MasterSettings().token_verifier() is None


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("PDMESH_OIDC_AUDIENCE", "", "needed with oidc_issuer"),
        ("PDMESH_OIDC_ISSUER", "http://id.example.org", "must begin with https://"),
        ("PDMESH_OIDC_ISSUER", "id.example.org", "of the form https://"),
        ("PDMESH_OIDC_ISSUER", "https://a:b@id.example.org", "of the form https://"),
        ("PDMESH_OIDC_JWKS_URL", "http://id.example.org/jwks", "must begin with https://"),
        ("PDMESH_OIDC_ALGORITHMS", '["HS256"]', "symmetric ones and none are refused"),
        ("PDMESH_OIDC_ALGORITHMS", '["none"]', "symmetric ones and none are refused"),
        ("PDMESH_OIDC_ROLES", '{"x": "root"}', "viewer"),
        ("PDMESH_OIDC_DEFAULT_LIMITS", '{"max_concurrent": 0}', "greater than 0"),
        ("PDMESH_OIDC_DEFAULT_LIMITS", '{"requests": 1}', "Extra inputs"),
    ],
)
def test_bad_settings_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    with pytest.raises(BadSetting) as refused:
        load(monkeypatch, **{variable: value})
    assert str(refused.value).startswith(f"{variable}: ")
    assert says in str(refused.value)


def test_plain_text_is_for_this_machine_and_trusted_networks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load(monkeypatch, PDMESH_OIDC_ISSUER="http://127.0.0.1:9000").token_verifier()
    plain = {"PDMESH_OIDC_ISSUER": "http://id", "PDMESH_INSECURE_NETWORK": "true"}
    assert load(monkeypatch, **plain).token_verifier()


def test_claims_are_where_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    names = load(
        monkeypatch,
        PDMESH_OIDC_TENANT_CLAIM="org",
        PDMESH_OIDC_LIMITS_CLAIM="limits",
        PDMESH_OIDC_ROLE_CLAIM="roles",
        PDMESH_OIDC_ROLES='{"sre": "operator"}',
        PDMESH_OIDC_DEFAULT_LIMITS='{"max_concurrent": 4, "priority": 2}',
    ).claim_names
    assert (names.tenant, names.limits, names.role) == ("org", "limits", "roles")
    assert names.roles == {"sre": AdminRole.OPERATOR}
    assert (names.default.max_concurrent, names.default.priority) == (4, 2)
