"""`pdmesh top`: shows requests and the load of instances, and updates the view until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time

from pdmesh.cli.connect import connected
from pdmesh.cli.view.live import LiveView
from pdmesh.cli.view.watching import TO_TOP_AND_CLEAR
from pdmesh.events.v1.events_pb2 import InstanceLoad, RequestFinished
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event


def run(options: argparse.Namespace) -> int:
    """Show the view until Ctrl-C, and return 0."""
    asyncio.run(_show(options))
    return 0


async def _show(options: argparse.Namespace) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stopping.set)
    view = LiveView(time.monotonic())

    async def on_finished(message: Message) -> None:
        view.on_finished(decode_event(message, RequestFinished), time.monotonic())

    async def on_load(message: Message) -> None:
        view.on_load(decode_event(message, InstanceLoad), time.monotonic())

    before = TO_TOP_AND_CLEAR if sys.stdout.isatty() else ""
    async with connected(options) as bus:
        await bus.subscribe(subjects.request_finished(), on_finished, on_gap=lambda: None)
        await bus.subscribe(subjects.instance_load(), on_load, on_gap=lambda: None)
        while not stopping.is_set():
            try:
                async with asyncio.timeout(options.every):
                    await stopping.wait()
            except TimeoutError:
                print(f"{before}{view.text(time.monotonic())}", flush=True)
