"""The errors that `pdmesh up` reports before anything starts, and the mesh that it asks for."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.cli import app
from pdmesh.cli.arguments import build_parser
from pdmesh.cli.commands import up
from pdmesh.cli.errors import CommandFailed
from pdmesh.embedded.ports import PortReservation, PortTaken
from pdmesh.launcher import state
from pdmesh.launcher.mesh import Mesh, MeshFailed
from pdmesh.launcher.spec import MeshSpec, Ports, Wiring, asked_of, services, unpaired


async def test_the_same_port_for_http_and_grpc_is_refused(tmp_path: Path) -> None:
    """Both servers would listen on the port, and every other call would reach the wrong one."""
    with PortReservation("127.0.0.1", 0) as free:
        port = free.port
    spec = MeshSpec(engine="sim", http_port=port, grpc_port=port)
    with pytest.raises(PortTaken, match=f"port {port} is used twice.*--grpc-port"):
        async with Mesh(spec, tmp_path):
            raise AssertionError("it started")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (MeshSpec(nats_url="nats://127.0.0.1:1"), "NATS does not answer.*omit --nats-url"),
        (MeshSpec(redis_url="redis://127.0.0.1:1"), "Redis: .*omit --redis-url"),
        (MeshSpec(nats_url="nats://me:pa/ss@host"), "^--nats-url: not of the form [a-z:/@]+ "),
        (MeshSpec(redis_url="redis://:pa#ss@host"), "^--redis-url: not of the form [a-z:/@]+ "),
    ],
)
async def test_an_unreachable_external_server_is_named_before_anything_starts(
    spec: MeshSpec, said: str, tmp_path: Path
) -> None:
    mesh = Mesh(replace(spec, engine="sim", http_port=0, grpc_port=0), tmp_path)
    with pytest.raises(MeshFailed, match=said):
        await mesh.__aenter__()
    assert mesh.names == []


DRAFT = '{"method": "draft_model", "model": "/models/small"}'


@pytest.mark.req("S67")
async def test_a_draft_that_only_decodes_have_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    """All instances would become ready, but no prefill could hand a request over to a decode."""
    spec = MeshSpec(engine="sim", http_port=0, grpc_port=0)
    own = {"decode": {"PDMESH_DECODE_SPECULATION": DRAFT}}
    mesh = Mesh(replace(spec, service_env=own), tmp_path)
    both = r"none \(PDMESH_PREFILL_SPECULATION\).*small \(PDMESH_DECODE_SPECULATION\)"
    with pytest.raises(MeshFailed, match=both):
        await mesh.__aenter__()
    assert mesh.names == []


def test_a_draft_of_all_roles_or_of_a_mesh_without_pairs_is_taken() -> None:
    wiring = Wiring("", "", {"": Ports(0, 0)}, "", "", Path(), Path())
    of_all = MeshSpec(env={"PDMESH_SPECULATION": DRAFT}, num_fusion=1)
    assert unpaired(services(of_all, wiring)) == ""
    own = {"prefill": {"PDMESH_PREFILL_SPECULATION": DRAFT}}
    alone = MeshSpec(num_prefill=0, num_fusion=1, service_env=own)
    assert unpaired(services(alone, wiring)) == ""
    assert unpaired(services(replace(alone, num_prefill=1), wiring))


def test_a_path_without_a_model_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["up", "--engine", "sim", "--model", str(tmp_path), "--state-dir", str(tmp_path)]
    with pytest.raises(SystemExit) as exit_info:
        app.main(arguments)
    assert exit_info.value.code == 1
    assert "is not a Hugging Face model directory (no config.json)" in capsys.readouterr().err
    assert not (tmp_path / "lock").exists()


def test_a_mesh_has_the_regions_that_its_file_names(tmp_path: Path) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text("regions: [eu, us]\ngroups:\n  chat: {prefill: 2, decode: 2}\n")
    asked = ["up", "--engine", "sim", "--groups", str(file), "--blank", "2"]
    spec = up._spec(build_parser().parse_args(asked))
    assert spec.regions == ("eu", "us")
    ports = {"eu": Ports(8000, 8001), "us": Ports(8010, 8011)}
    wiring = Wiring("nats://x", "redis://x", ports, "secret", "token", tmp_path, tmp_path / "model")
    found = {process.name: process for process in services(spec, wiring)}
    own = {f"{r}-{name}" for r in ports for name in ("instance-0", "instance-1", "gateway-0")}
    masters = {f"{region}-master-scheduler" for region in ports}
    assert found.keys() == own | masters | {"kv-cache-index", "health-monitor"}
    assert found["us-gateway-0"].env["PDMESH_GATEWAY_HTTP_PORT"] == "8010"
    assert found["us-instance-1"].env["PDMESH_INSTANCE_REGION"] == "us"
    assert found["health-monitor"].region == ""


def test_the_gateways_get_the_parsers_that_are_named(tmp_path: Path) -> None:
    ports = {"": Ports(8000, 8001)}
    wiring = Wiring("nats://x", "redis://x", ports, "secret", "token", tmp_path, tmp_path / "model")
    for asked, expected in (
        (["--tool-parser", "hermes", "--reasoning-parser", "none"], ("hermes", "none")),
        ([], (None, None)),
    ):
        spec = up._spec(build_parser().parse_args(["up", "--engine", "sim", *asked]))
        (env,) = (each.env for each in services(spec, wiring) if each.service == "gateway")
        names = ("PDMESH_GATEWAY_TOOL_PARSER", "PDMESH_GATEWAY_REASONING_PARSER")
        assert tuple(map(env.get, names)) == expected


@pytest.mark.parametrize(
    ("regions", "message"),
    [("eu,eu", "named twice"), ("eu,", "'' is not a name"), ("eu", "also names us")],
)
def test_impossible_regions_are_refused(tmp_path: Path, regions: str, message: str) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text("regions: [eu, us]\ngroups:\n  chat: {prefill: 2, decode: 2}\n")
    asked = ["up", "--engine", "sim", "--groups", str(file), "--regions", regions]
    with pytest.raises(CommandFailed, match=message):
        up._spec(build_parser().parse_args(asked))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--keys", "{}/none.json"], "make one with: pdmesh keys add TENANT --file {}/none.json"),
        (["--host", "0.0.0.0"], "--keys FILE .* or --allow-anonymous"),
        (["--host", "a-host"], "other machines can reach a-host"),
    ],
)
def test_an_unusable_port_is_reported_before_anything_starts(
    tmp_path: Path, asked: list[str], message: str
) -> None:
    asked = [each.format(tmp_path) for each in asked]
    with pytest.raises(CommandFailed, match=message.format(tmp_path)):
        up._spec(build_parser().parse_args(["up", "--engine", "sim", *asked]))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--inner-host", "10.0.0.5"], "other machines can reach 10.0.0.5: give --tls, or --insec"),
        (["--inner-host", "node-3"], "--insecure-network on a trusted network"),
        (
            ["--nats-url", "nats://me:quiet@nats:4222"],
            r"--nats-url: nats://\*\*\*@nats:4222 is not",
        ),
        (["--nats-url", "10.0.0.5:4222"], "begin it with tls://"),
        (["--redis-url", "redis://10.0.0.5:6379/0", "--tls"], "begin it with rediss://"),
    ],
)
def test_plain_text_on_a_network_is_refused_before_anything_starts(
    asked: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CommandFailed, match=message):
        up._spec(build_parser().parse_args(["up", "--engine", "sim", *asked]))
    options = ["up", "--engine", "sim", *asked, "--insecure-network"]
    assert up._spec(build_parser().parse_args(options)).insecure_network
    monkeypatch.setenv("PDMESH_INSECURE_NETWORK", "true")
    up._spec(build_parser().parse_args(["up", "--engine", "sim", *asked]))


@pytest.mark.parametrize(
    "asked",
    [
        ["--inner-host", "10.0.0.5", "--tls"],
        ["--nats-url", "tls://nats:4222", "--redis-url", "rediss://redis:6379/0"],
        ["--nats-url", "nats://[::1]:4222", "--redis-url", "unix:///run/valkey.sock"],
        ["--nats-url", "localhost:4222", "--redis-url", "redis://127.0.0.2:6379"],
    ],
)
def test_what_is_encrypted_or_stays_on_this_machine_is_allowed(asked: list[str]) -> None:
    spec = up._spec(build_parser().parse_args(["up", "--engine", "sim", *asked]))
    assert not spec.insecure_network


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_no_key_is_needed_on_a_loopback_address(host: str) -> None:
    spec = up._spec(build_parser().parse_args(["up", "--engine", "sim", "--host", host]))
    assert (spec.host, spec.keys_file) == (host, None)


def test_the_gateways_may_be_told_whether_keys_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDMESH_GATEWAY_ALLOW_ANONYMOUS", "true")
    spec = up._spec(build_parser().parse_args(["up", "--engine", "sim", "--host", "0.0.0.0"]))
    assert spec.host == "0.0.0.0"


def test_a_running_mesh_with_other_options_is_not_reused(tmp_path: Path) -> None:
    def spec(*asked: str) -> MeshSpec:
        return up._spec(build_parser().parse_args(["up", "--engine", "sim", *asked]))

    running = state.MeshState(
        7, "ready", "sim", "sim", "http://127.0.0.1:8000", "127.0.0.1:8001", "nats://x",
        "unix:///x",
        asked=asked_of(spec("--nats-url", "tls://me:quiet@x:1")),
    )  # fmt: skip
    assert "quiet" not in str(running.asked)
    assert up._is_up_already(running, spec("--nats-url", "tls://me:quiet@x:1"), tmp_path) == 0
    with pytest.raises(CommandFailed) as said:
        up._is_up_already(running, spec("--nats-url", "tls://y", "--host", "localhost"), tmp_path)
    assert str(said.value) == (
        "a mesh is already up (pid 7) with other options: --host 127.0.0.1, not localhost; "
        f"--nats-url tls://***@x:1, not tls://y; stop it with: pdmesh down --state-dir {tmp_path}"
    )


def test_suggested_commands_are_complete(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    spec = MeshSpec(engine="sim", keys_file=keys)
    shown = up._what_next("http://[::1]:8000", "[::1]:8001", tmp_path, spec)
    commands = [line.strip() for line in shown.splitlines() if "pdmesh " in line]
    assert len(commands) == 5
    assert all(f"--state-dir {tmp_path}" in line for line in commands)
    assert f"keys add TENANT --file {keys}" in commands[0]
    assert "Authorization: Bearer $PDMESH_API_KEY" in shown
    assert "curl -g http://[::1]:8000/v1/chat/completions" in shown
    assert "PDMESH_API_KEY" not in up._what_next("http://x", "x:1", tmp_path, MeshSpec())


def test_a_mesh_may_listen_on_ipv6(tmp_path: Path) -> None:
    with PortReservation("::1", 0) as first:
        assert first.address == f"[::1]:{first.port}"
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(PortTaken, match=f"port {port} on ::1 is taken"):
                PortReservation("::1", port)


def test_a_launcher_whose_log_is_lost_still_reports_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the launcher's log is lost. `up --detach` once returned 1 without a
    message.
    """
    ends = "import os; os.kill(os.getpid(), 9)"
    options = build_parser().parse_args(["up", "--state-dir", str(tmp_path)])
    with (tmp_path / "log").open("w+") as lines:
        silent = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
        with pytest.raises(CommandFailed, match="ended with code 1 and could not say why"):
            up._follow(silent, lines, options)
        killed = subprocess.Popen([sys.executable, "-c", ends])
        with pytest.raises(CommandFailed, match="was killed by signal 9"):
            up._follow(killed, lines, options)
    with (tmp_path / "log").open("w+") as lines:
        said = "import sys; print('pdmesh: no room', file=sys.stderr); sys.exit(3)"
        with (tmp_path / "log").open("a") as output:
            told = subprocess.Popen([sys.executable, "-c", said], stderr=output)
        assert up._follow(told, lines, options) == 3
