"""Tests a service process from the side of an operator: its health, metrics, signals, exit codes
and log lines.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.sites.certificates import TestAuthority
from tests.support.waiting import wait_until

SERVICE = """
import asyncio
from pathlib import Path
import structlog
from pdmesh.config import ServiceSettings, settings_config
from pdmesh.service_process import StartupError, run
from pdmesh.telemetry import metrics, traces

things = metrics.counter("test.things", "Things counted")

class Settings(ServiceSettings):
    model_config = settings_config("PDMESH_KV_CACHE_INDEX_")
    behaviour: str = "serve"

async def serve(settings, app):
    gate = settings.state_dir / "gate"
    app.add_readiness("gate", gate.exists)
    things.add(3, {"role": "prefill"})
    with traces.tracer().start_as_current_span("x"):
        structlog.get_logger().info("test.line", request_id="request-1", number=1)
    secret_prompt = "my secret prompt"
    if settings.behaviour == "crash":
        raise ValueError("broken")
    if settings.behaviour == "chatter":
        import gc, threading, warnings
        from pdmesh.net.grpc import rpc
        class Bad:
            def __del__(self):
                raise ValueError("nobody catches this")
        Bad()
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        warnings.warn("look out")
        try:
            rpc.server().add_insecure_port(app.ops_address)  # taken
        except RuntimeError:
            pass
        return
    if settings.behaviour == "refuse":
        raise StartupError("no model in /nowhere; set PDMESH_MODEL_DIR")
    await app.stopping.wait()
    if settings.behaviour == "linger":
        await asyncio.sleep(60)

run("kv-cache-index", Settings, serve)
"""


class Process:
    def __init__(self, directory: Path, *command: str, **settings: str) -> None:
        self.ops_file = directory / "ops"
        self.log = directory / "log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PDMESH_")}
        environment |= {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PDMESH_STATE_DIR": str(directory),
            "PDMESH_KV_CACHE_INDEX_OPS_FILE": str(self.ops_file),
            "PDMESH_KV_CACHE_INDEX_INSTANCE_ID": "index-0",
            **settings,
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *(command or ("-c", SERVICE))],
                env=environment,
                stderr=log,
                stdout=log,
            )

    def get(self, path: str) -> tuple[int, str]:
        url = f"http://{self.ops_file.read_text()}{path}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()

    def until_up(self) -> None:
        wait_until(lambda: self.ops_file.exists() and "test.line" in self.log.read_text())

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.process.kill()
        process.process.wait()


def test_health_and_metrics_show_the_state_of_a_process(
    tmp_path: Path, processes: list[Process]
) -> None:
    processes.append(process := Process(tmp_path))
    process.until_up()
    assert process.get("/health/live")[0] == 200
    status, body = process.get("/health/ready")
    assert (status, json.loads(body)["waiting_for"]) == (503, ["gate"])
    (tmp_path / "gate").touch()
    assert process.get("/health/ready")[0] == 200
    metrics = process.get("/metrics")[1]
    assert 'test_things_total{role="prefill"} 3.0' in metrics
    assert process.stop() == 0


def test_log_lines_are_json_with_the_ids_of_the_request(
    tmp_path: Path, processes: list[Process]
) -> None:
    processes.append(process := Process(tmp_path))
    process.until_up()
    process.stop()
    line = next(entry for entry in process.lines() if entry["event"] == "test.line")
    assert line["request_id"] == "request-1"
    assert len(line["trace_id"]) == 32
    assert (line["service"], line["instance"]) == ("kv-cache-index", "index-0")


def test_on_a_full_disk_only_log_lines_are_lost(tmp_path: Path, processes: list[Process]) -> None:
    """Once, each log line raised an error in the code that logged it. Requests broke off, and
    SIGTERM did not end the process.
    """
    (tmp_path / "log").symlink_to("/dev/full")
    processes.append(process := Process(tmp_path))
    (tmp_path / "gate").touch()
    wait_until(lambda: process.ops_file.exists() and process.get("/health/ready")[0] == 200)
    assert process.stop() == 0


def test_an_ops_file_that_cannot_be_written_is_written_later(
    tmp_path: Path, processes: list[Process]
) -> None:
    """The file cannot be written when the disk is full.

    Once, this ended the service, and after ten such deaths the launcher gave the service up.
    """
    (blocked := tmp_path / "run").touch()
    file = blocked / "ops"
    processes.append(process := Process(tmp_path, PDMESH_KV_CACHE_INDEX_OPS_FILE=str(file)))
    wait_until(lambda: "test.line" in process.log.read_text() or process.process.poll() is not None)
    assert process.process.poll() is None
    assert [line["event"] for line in process.lines()].count("service.ops_file_not_written") == 1
    blocked.unlink()
    process.ops_file = file
    wait_until(lambda: file.exists() and process.get("/health/live")[0] == 200)
    assert process.stop() == 0


def test_every_log_line_is_json_whatever_wrote_it(tmp_path: Path, processes: list[Process]) -> None:
    """Once, some lines from gRPC's library, the warnings module, a thread and a finalizer were
    plain text.
    """
    settings = {"PDMESH_KV_CACHE_INDEX_BEHAVIOUR": "chatter"}
    processes.append(process := Process(tmp_path, **settings))
    assert process.process.wait(30) == 0
    told = [json.dumps(line) for line in process.lines()]
    for word in ("nobody catches this", "ZeroDivisionError", "look out"):
        assert any(word in line for line in told), word


@pytest.mark.parametrize("log_format", ["json", "pretty"])
def test_a_crash_exits_1_and_its_traceback_shows_no_local_variables(
    log_format: str, tmp_path: Path, processes: list[Process]
) -> None:
    settings = {"PDMESH_KV_CACHE_INDEX_BEHAVIOUR": "crash", "PDMESH_LOG_FORMAT": log_format}
    processes.append(process := Process(tmp_path, **settings))
    assert process.process.wait(60) == 1
    log = process.log.read_text()
    assert "ValueError: broken" in log
    assert "my secret prompt" not in log


def test_a_failure_that_an_operator_can_repair_is_one_line_without_a_traceback(
    tmp_path: Path, processes: list[Process]
) -> None:
    processes.append(process := Process(tmp_path, PDMESH_KV_CACHE_INDEX_BEHAVIOUR="refuse"))
    assert process.process.wait(60) == 1
    last = process.lines()[-1]
    assert (last["event"], "exception" in last) == ("service.failed", False)
    assert last["reason"] == "no model in /nowhere; set PDMESH_MODEL_DIR"


def test_an_inner_port_that_others_reach_needs_tls_or_the_mesh_token(
    tmp_path: Path, processes: list[Process]
) -> None:
    address = {"PDMESH_INNER_HOST": "0.0.0.0"}
    assert refusal(tmp_path, processes, address) == (
        "refusing to listen on 0.0.0.0 without TLS: set PDMESH_TLS_DIR (pdmesh certs makes "
        "certificates), or set PDMESH_INSECURE_NETWORK=true on a network that you trust"
    )
    plain = {**address, "PDMESH_INSECURE_NETWORK": "true"}
    assert refusal(tmp_path, processes, plain) == (
        "refusing to listen on 0.0.0.0 without a mesh token: set PDMESH_MESH_TOKEN or "
        "PDMESH_MESH_TOKEN_FILE, the same for all processes of the mesh"
    )
    (tmp_path / "token").write_text("of-a-mesh-over-many-machines")
    tls_dir = TestAuthority(tmp_path / "tls").issue("kv-cache-index", "index-0")
    for settings in (
        {**plain, "PDMESH_MESH_TOKEN_FILE": str(tmp_path / "token")},
        {**address, "PDMESH_TLS_DIR": str(tls_dir)},
    ):
        processes.append(process := Process(tmp_path, **settings))
        wait_until(process.ops_file.exists)
        assert process.get("/health/live")[0] == 200
        assert process.stop() == 0
        process.ops_file.unlink()


def refusal(tmp_path: Path, processes: list[Process], settings: dict[str, str]) -> str:
    processes.append(process := Process(tmp_path, **settings))
    assert process.process.wait(60) == 1
    (line,) = process.lines()
    assert line["event"] == "service.failed"
    return str(line["reason"])


def test_a_server_that_others_reach_is_used_only_over_tls(
    tmp_path: Path, processes: list[Process]
) -> None:
    nats = {"PDMESH_NATS_URL": "nats://me:quiet@nats.example.org:4222"}
    assert refusal(tmp_path, processes, nats) == (
        "refusing to use nats://***@nats.example.org:4222 without TLS: begin PDMESH_NATS_URL with "
        "tls://, or set PDMESH_INSECURE_NETWORK=true on a network that you trust"
    )
    processes.append(process := Process(tmp_path, **nats, PDMESH_INSECURE_NETWORK="true"))
    process.until_up()


def test_a_process_starts_only_with_a_certificate_that_is_valid_and_its_own(
    tmp_path: Path, processes: list[Process]
) -> None:
    authority = TestAuthority(tmp_path / "tls")
    own = authority.issue("kv-cache-index", "index-0")
    refused = {
        authority.issue("kv-cache-index", "index-1"): "index-1, but this process is kv-cache-index",
        authority.issue("gateway", "index-0"): "is for gateway/index-0, but this process is",
        authority.issue("prefill", "late", days=-1): "tls.crt expired at",
        tmp_path / "nowhere": "tls.crt: No such file or directory",
    }
    for folder, reason in refused.items():
        processes.append(process := Process(tmp_path, PDMESH_TLS_DIR=str(folder)))
        assert process.process.wait(60) == 1
        (line,) = process.lines()
        assert (line["event"], reason in line["reason"]) == ("service.failed", True), line
    processes.append(process := Process(tmp_path, PDMESH_TLS_DIR=str(own)))
    process.until_up()
    left = r"(?m)^pdmesh_process_certificate_left_seconds(?:\{.*\})? (\S+)"
    (found,) = re.findall(left, process.get("/metrics")[1])
    assert 0 < float(found) <= 86_400


def test_a_bad_setting_exits_2_with_one_line(tmp_path: Path, processes: list[Process]) -> None:
    processes.append(process := Process(tmp_path, PDMESH_LEASE_S="soon"))
    assert process.process.wait(60) == 2
    assert process.log.read_text().startswith("pdmesh-kv-cache-index: bad setting PDMESH_LEASE_S: ")
    assert process.log.read_text().count("\n") == 1


def test_a_setting_that_names_a_bad_file_exits_2_and_says_so_without_a_traceback(
    tmp_path: Path, processes: list[Process]
) -> None:
    """The process must exit before it connects to NATS. No NATS runs here, so the process would
    wait for it.
    """
    token = tmp_path / "token"
    token.write_text("short\n")
    processes.append(
        process := Process(
            tmp_path, "-m", "pdmesh.services.master_scheduler", PDMESH_ADMIN_TOKEN_FILE=str(token)
        )
    )
    assert process.process.wait(60) == 2
    last = process.lines()[-1]
    assert (last["event"], "exception" in last) == ("service.failed", False)
    assert last["reason"].startswith("bad setting PDMESH_ADMIN_TOKEN: ")


def test_a_second_signal_ends_a_process_that_lingers(
    tmp_path: Path, processes: list[Process]
) -> None:
    processes.append(process := Process(tmp_path, PDMESH_KV_CACHE_INDEX_BEHAVIOUR="linger"))
    process.until_up()
    process.process.send_signal(signal.SIGINT)
    wait_until(lambda: "service.stopping" in process.log.read_text())
    assert process.process.poll() is None
    assert process.stop() == 128 + signal.SIGTERM
