"""Pauses for garbage collection are recorded by generation, whichever thread collects."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Mapping

import pytest

from pdmesh import service_process
from pdmesh.service_process import App
from pdmesh.telemetry.gc_watch import GcWatch

Pause = tuple[float, str]


def watch(times: list[float]) -> tuple[GcWatch, list[Pause]]:
    found: list[Pause] = []

    def record(seconds: float, labels: Mapping[str, str]) -> None:
        found.append((seconds, labels["generation"]))

    return GcWatch(iter(times).__next__, record), found


def test_a_pause_lasts_from_its_start_to_its_stop() -> None:
    noted, found = watch([1.0, 1.25, 5.0, 7.0])
    noted("stop", {"generation": 1})  # of a collection that began before the watch
    for generation in (0, 2):
        noted("start", {"generation": generation})
        noted("stop", {"generation": generation})
    assert found == [(0.25, "0"), (2.0, "2")]


def test_it_sees_the_collections_of_all_threads_while_it_runs() -> None:
    noted, found = watch(list(map(float, range(1000))))
    noted.start()
    try:
        for generation in range(3):
            thread = threading.Thread(target=gc.collect, args=(generation,))
            thread.start()
            thread.join()
    finally:
        noted.stop()
    gc.collect()
    assert {generation for _, generation in found} == {"0", "1", "2"}
    assert len([each for each in found if each[1] == "2"]) == 1, "none after the stop"


async def test_what_is_loaded_until_a_process_is_ready_is_never_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collection of an engine's libraries would stop an instance for long."""
    monkeypatch.setattr(service_process, "_LOOK_READY_S", 0.001)
    app, is_ready = App("gateway", "gateway-0", 1, asyncio.Event()), False
    app.add_readiness("model", lambda: is_ready)
    waiting = asyncio.create_task(service_process._freeze_when_ready(app))
    loaded: list[object] = [[]]
    await asyncio.sleep(0.01)
    assert any(each is loaded for each in gc.get_objects())
    is_ready = True
    try:
        await waiting
        assert not any(each is loaded for each in gc.get_objects())
    finally:
        gc.unfreeze()
