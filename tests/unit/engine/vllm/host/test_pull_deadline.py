"""Tests when the host of a vLLM engine gives up a pull.

The deadline counts from the start of the pull, however long the engine's steps take.
"""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.engine.base import (
    ArenaRange,
    DecodeJob,
    Failed,
    KvArrived,
    KvPulling,
    Output,
    Sampling,
    Ticket,
)
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.engine.vllm.engine import VllmEngine
from pdmesh.engine.vllm.host.jobs import Endpoint, Jobs
from pdmesh.engine.vllm.messages import Arrived, Pulling
from tests.support.waiting import PATIENCE_S

WAITS, ARRIVED, SILENT = 1, 2, 3


@pytest.mark.fault("F8", "F23")
async def test_a_deadline_covers_the_pull_but_no_wait_for_its_turn_or_for_a_slot(
    tmp_path: Path,
) -> None:
    """Three loads begin before a step that takes longer than a pull. One waits for its turn. One
    has its KV and waits for a slot. One has begun its pull and reports nothing more.
    """
    config = VllmConfig(instance_id="decode-0", incarnation=1, model="m", model_dir=tmp_path)
    engine = VllmEngine(config)
    cancelled: list[int] = []
    requests: Any = SimpleNamespace(submit=lambda *_, **__: None, cancel=cancelled.append)
    engine._requests = requests
    engine._jobs = Jobs(Endpoint("decode-0", 1, "fp", ("address",), 10, 4, 5000, 100), 1)
    for leg in (WAITS, ARRIVED, SILENT):
        ticket = Ticket(f"t{leg}", "r", 0, "prefill-0", 7, "fp", 9, 120, ("address",), 5000)
        prompt, landing = array("I", range(9)), ArenaRange(4096 * leg, 4096)
        engine.decode(DecodeJob(leg, "r", 0, prompt, 5, ticket, landing, Sampling(8), 0.05))
    for message in (Pulling(0, ARRIVED), Arrived(0, ARRIVED), Pulling(0, SILENT)):
        engine._on_worker_message(message)
    said: list[Output] = []
    async with asyncio.timeout(PATIENCE_S):
        async for outputs in engine.outputs():
            said += outputs
            if any(isinstance(output, Failed) for output in said):
                break
    assert said[:3] == [KvPulling(ARRIVED), KvArrived(ARRIVED), KvPulling(SILENT)]
    assert [output.leg for output in said if isinstance(output, Failed)] == cancelled == [SILENT]
    assert not engine._deadlines, "no other load will become overdue"
