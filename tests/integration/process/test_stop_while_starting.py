"""Sends SIGTERM to services that still wait for NATS. They must stop waiting and end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.tiny_model import write_tiny_model
from tests.support.waiting import wait_until

SERVICES = ["gateway", "master_scheduler", "health_monitor", "kv_cache_index", "prefill"]


@pytest.mark.fault("F18")
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_waits_for_nats_ends_when_asked(tmp_path: Path, service: str) -> None:
    """This happens with `pdmesh down` after NATS could not start, or in a rollout without NATS."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # the socket never listens, so its port refuses connections
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PDMESH_")}
        environment |= {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PDMESH_STATE_DIR": str(tmp_path),
            "PDMESH_MODEL_DIR": str(write_tiny_model(tmp_path / "model")),
            "PDMESH_NATS_URL": f"nats://127.0.0.1:{nobody.getsockname()[1]}",
            "PDMESH_LOG_FORMAT": "json",
            "PDMESH_ENGINE": "sim",
            "PDMESH_GATEWAY_HTTP_PORT": "0",
            "PDMESH_GATEWAY_GRPC_PORT": "0",
        }
        path = tmp_path / "log"
        with path.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", f"pdmesh.services.{service}"],
                env=environment,
                stdout=output,
                stderr=output,
            )
        try:
            wait_until(lambda: "bus.unreachable" in path.read_text())
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert "service.stopped" in path.read_text()
        finally:
            process.kill()
            process.wait()
