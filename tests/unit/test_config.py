"""The sources of a setting's value, and the error for a bad value."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import BaseModel, Field, SecretStr, ValidationError

from pdmesh.config import (
    BadSetting,
    ServiceSettings,
    describe,
    read_secret,
    settings_config,
    shared,
    unknown_variables,
    url_problem,
)


class Parts(BaseModel):
    name: str


class Settings(ServiceSettings):
    model_config = settings_config("PDMESH_MASTER_SCHEDULER_")

    hash_secret: SecretStr = shared(SecretStr("quiet"), description="Key")
    redis_url: str = shared("redis://me:quiet@redis:6379/0", description="Redis")
    num_plans: int = Field(4, ge=1, description="Plans at once")
    weights: dict[str, float] = shared({}, description="By scenario, as JSON")
    parts: Parts | None = shared(None, description="With parts, as JSON")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PDMESH_"):
            monkeypatch.delenv(name)


def test_a_shared_setting_answers_to_the_plain_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_NATS_URL", "nats://all:4222")
    assert Settings.load().nats_url == "nats://all:4222"


def test_the_services_own_name_wins_over_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_NATS_URL", "nats://all:4222")
    monkeypatch.setenv("PDMESH_MASTER_SCHEDULER_NATS_URL", "nats://mine:4222")
    assert Settings.load().nats_url == "nats://mine:4222"


@pytest.mark.parametrize("field", ["GRPC_PORT", "OPS_PORT", "INSTANCE_ID", "NUM_PLANS"])
def test_settings_of_one_process_do_not_apply_to_the_plain_name(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If PDMESH_GRPC_PORT applied to all services, all of them would use the same port."""
    monkeypatch.setenv(f"PDMESH_{field}", "9")
    assert str(getattr(Settings.load(), field.lower())) != "9"


def test_a_process_without_a_name_is_called_by_its_service_and_four_hex_digits() -> None:
    first, second = Settings.load().instance_id, Settings.load().instance_id
    assert first != second
    service, _, digits = first.rpartition("-")
    assert service == "master-scheduler"
    assert len(digits) == 4
    assert int(digits, 16) >= 0


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PDMESH_LEASE_S", "0"),
        ("PDMESH_MASTER_SCHEDULER_NUM_PLANS", "many"),
        ("PDMESH_MASTER_SCHEDULER_INSTANCE_ID", "Has.Dots"),
        ("PDMESH_LOG_LEVEL", "loud"),
        ("PDMESH_MASTER_SCHEDULER_WEIGHTS", "{half"),
        ("PDMESH_WEIGHTS", "half}"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_the_variable(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(BadSetting) as caught:
        Settings.load()
    assert str(caught.value).startswith(f"{variable}: ")
    assert "\n" not in str(caught.value)


def test_a_bad_value_within_a_setting_is_named_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_WEIGHTS", '{"chat": "heavy"}')
    with pytest.raises(BadSetting, match=r"^PDMESH_WEIGHTS: chat: "):
        Settings.load()


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_OTLP_ENDPOINT", "")
    assert Settings.load().otlp_endpoint is None


@pytest.mark.parametrize("url", ["nats://me:pa/ss@host:4222", "nats://me:pa#ss@host", "nats://"])
def test_an_address_that_cannot_be_read_is_a_line_without_its_password(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """The client of NATS once raised an error during the start, and the log showed the beginning of
    the password.
    """
    monkeypatch.setenv("PDMESH_NATS_URL", url)
    with pytest.raises(BadSetting, match=r"^PDMESH_NATS_URL: not of the form") as raised:
        Settings.load()
    assert "pa" not in str(raised.value).replace("password", "")


@pytest.mark.parametrize(
    "url",
    [
        "nats://host", "nats://me:secret@host:4222", "nats://[::1]:4222", "host:4222", "host",
        "tls://token@host", "redis://:a%2Fb@host:6379/0", "unix:///run/valkey.sock",
    ],
)  # fmt: skip
def test_an_address_may_have_any_form_that_its_server_accepts(url: str) -> None:
    assert not url_problem(url)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Settings.load().lease_s = 1.0


def test_every_setting_is_described_and_no_secret_is_shown() -> None:
    lines = list(describe(Settings, Settings.load()))
    assert [line.variable for line in lines if not line.help] == []
    assert "quiet" not in repr(lines)
    by_name = {line.variable: line for line in lines}
    assert by_name["PDMESH_MASTER_SCHEDULER_HASH_SECRET"].value == "********"
    assert by_name["PDMESH_MASTER_SCHEDULER_REDIS_URL"].value == "redis://***@redis:6379/0"
    assert by_name["PDMESH_MASTER_SCHEDULER_NUM_PLANS"].shared_variable is None


def test_the_type_of_a_setting_is_shown_as_an_operator_writes_it() -> None:
    types = {line.variable: line.type_name for line in describe(Settings)}
    prefix = str(Settings.model_config["env_prefix"])
    assert types[f"{prefix}LOG_FORMAT"] == "auto, json or pretty"
    assert types[f"{prefix}OPS_FILE"] == "Path"
    assert types[f"{prefix}WEIGHTS"] == types[f"{prefix}PARTS"] == "JSON"
    assert types[f"{prefix}NUM_PLANS"] == "int"


def test_the_reachable_host_is_the_advertised_one() -> None:
    assert Settings(advertise_host="node-7").reachable_host == "node-7"
    assert Settings(inner_host="0.0.0.0").reachable_host == "0.0.0.0"


def test_the_node_s_name_may_have_dots_as_in_kubernetes_and_the_mesh_s_own_has_none() -> None:
    """The name is one token of a NATS subject, and dots separate tokens."""
    assert Settings(node_id="ip-10-0-0-1.ec2.internal").node == "ip-10-0-0-1-ec2-internal"
    assert Settings(node_id="rack-3-node-7").node == "rack-3-node-7"
    with pytest.raises(ValidationError):
        Settings(node_id="Node_7")


def test_a_variable_that_no_field_reads_is_named() -> None:
    prefix = Settings.model_config["env_prefix"]
    environ = {f"{prefix}HSOT": "::", f"{prefix}INNER_HOST": "::", "PDMESH_OTHER": "1", "PATH": ""}
    assert unknown_variables(Settings, environ) == [f"{prefix}HSOT"]


def test_a_secret_comes_from_its_setting_or_its_file_and_must_not_be_short(tmp_path: Path) -> None:
    def read(value: str, file: Path | None) -> str:
        return read_secret("MESH_TOKEN", value, file, "a mesh token")

    secret, file = "0123456789abcdef0123", tmp_path / "token"
    file.write_text(f"{secret}\n")
    assert (read("", file), read(secret, None), read("", None)) == (secret, secret, "")
    for content, problem in (("short", "at least 16"), ("\n", "is empty"), ("ü" * 20, "ASCII")):
        file.write_text(content)
        with pytest.raises(BadSetting, match=f"PDMESH_MESH_TOKEN.*{problem}"):
            read("", file)
    with pytest.raises(BadSetting, match="no-such-file: No such file"):
        read("", tmp_path / "no-such-file")
