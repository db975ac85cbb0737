"""`pdmesh rollout status`: waits until the groups are as in one version of the desired state."""

from __future__ import annotations

import argparse
import asyncio
from typing import Final

from pdmesh.cli.errors import CommandFailed
from pdmesh.cli.leader import leader_of
from pdmesh.cli.rollout_progress import Rollout, rollout_of
from pdmesh.cli.view.output import show
from pdmesh.cli.view.progress import ProgressLine
from pdmesh.errors import Unavailable

_PAUSE_S: Final = 1.0  # between two calls to the leader


def run(options: argparse.Namespace) -> int:
    asyncio.run(_status(options))
    return 0


async def _status(options: argparse.Namespace) -> None:
    version = options.version or (await leader_of(options).groups()).version
    if not version:
        raise CommandFailed("no desired state has been applied yet")
    seen = await wait(options, version)
    show(options, {"version": version, "text": seen.text}, lambda: done_text(version, seen))


async def wait(options: argparse.Namespace, version: int) -> Rollout:
    """Wait for the rollout of `version`. Raises CommandFailed if it fails, or at the timeout."""
    line, seen = ProgressLine(), Rollout(False, "nothing is known yet")
    try:
        async with asyncio.timeout(options.timeout):
            while not seen.is_done:
                seen = await _look(options, version)
                if seen.failure:
                    raise CommandFailed(f"version {version}: {seen.failure}")
                line.say(f"version {version}: {seen.text}")
                if not seen.is_done:
                    await asyncio.sleep(_PAUSE_S)
    except TimeoutError:
        waited = f"not rolled out after {options.timeout:g} s"
        raise CommandFailed(f"version {version}: {waited}: {seen.text}") from None
    finally:
        line.end()
    return seen


def done_text(version: int, seen: Rollout) -> str:
    return f"version {version} is rolled out: {seen.text}"


async def _look(options: argparse.Namespace, version: int) -> Rollout:
    try:
        return rollout_of(await leader_of(options).groups(), version)
    except Unavailable as exc:  # if the leader died, another master will lead soon
        return Rollout(False, exc.message)
