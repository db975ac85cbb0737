"""The worker's half of the hand-off, where vLLM runs no further step."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from pdmesh.core.arena import ArenaRange
from pdmesh.core.ticket import Ticket
from pdmesh.engine.vllm.handoff import Load, StepPlan
from pdmesh.engine.vllm.messages import FrameBuffer, LandingClear, ToHost, decode_to_host

TICKET = Ticket("t1", "r", 0, "prefill-0", 7, "fp", 8, 128, ("addr",), 5000)


class OnePull:
    """An agent whose pulls end when the test says so."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()

    def pull(self, *_: object, **__: object) -> Future[Any]:
        return self.future

    def close(self) -> None: ...


@pytest.fixture
def host(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control"))
        listener.listen(1)
        listener.settimeout(2)
        yield listener


def heard(connection: socket.socket) -> list[ToHost]:
    connection.settimeout(2)
    return [decode_to_host(f) for f in FrameBuffer().feed(connection.recv(65536))]


def test_a_ticket_taken_without_bytes_frees_its_landing_though_vllm_runs_no_step(
    host: socket.socket,
) -> None:
    """All blocks were cached and the answer was one token: vLLM may be idle by the time the ack has gone out."""
    pytest.importorskip("torch")
    from pdmesh.engine.vllm.worker import HandoffWorker

    config = {"failpoints": "", "control_path": host.getsockname()}
    worker = HandoffWorker(config, rank=0, num_ranks=1, num_blocks=8)
    connection, _ = host.accept()
    agent = OnePull()
    worker._agent = agent  # type: ignore[assignment]
    try:
        take = Load("key", 3, TICKET, ArenaRange(0, 128), 1e9, 8, num_local_blocks=2)
        worker.begin(StepPlan(takes=[take]))
        agent.future.set_result(None)
        assert heard(connection) == [LandingClear(0, 3)]
    finally:
        worker.close()
        connection.close()
