"""The delay of the event loop is divided into the process's own part and the machine's part."""

from __future__ import annotations

import asyncio
import time

from pdmesh.telemetry.loop_watch import LoopWatch


def test_cpu_time_bounds_the_delay_that_the_process_caused_itself() -> None:
    watch = LoopWatch(0.005)
    watch.note(late_s=0.3, cpu_s=0.01)  # another process used the core
    watch.note(late_s=0.02, cpu_s=0.05)  # another thread of the process computed at the same time
    assert watch.take() == (0.3, 0.02)
    assert watch.take() == (0.0, 0.0)


async def test_a_callback_that_computes_is_detected() -> None:
    watch = LoopWatch(0.001)
    running = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    await asyncio.sleep(0.002)
    running.cancel()
    lag_s, held_s = watch.take()
    assert lag_s >= held_s >= 0.04
