"""The nemesis (F42) attacks a mesh with random faults and operator's orders while clients send
requests.

All invariants are checked after each step. `make chaos` runs for two minutes. `CHAOS_S=600 make
chaos` is the nightly form, and `CHAOS_SEED=7` repeats a plan. The plan is printed while it runs. A
failure prints the seed, all actions so far, the violations, and the path of the logs.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.chaos.nemesis import invariants
from tests.chaos.nemesis.actions import Action, Outage
from tests.chaos.nemesis.arena import Arena, arena
from tests.chaos.nemesis.invariants import Books, within
from tests.chaos.nemesis.plan import Step, steps
from tests.chaos.nemesis.witness import Violation, Witness
from tests.support.attack.steady_clients import Asked, Clients
from tests.support.sites import fleet
from tests.support.waiting import until

DURATION_S: Final = float(os.environ.get("CHAOS_S") or 120)
SEED: Final = int(os.environ.get("CHAOS_SEED") or random.randrange(10_000))
_READY_S: Final = 40.0  # until every process is up again
# requests continue for this time, because faults have effects after their end
_AFTER_S: Final = 1.5

pytestmark = [
    pytest.mark.timeout(DURATION_S + 300),
    # After an outage of the server, nats-py leaves its socket to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning"),
]


class Journal:
    """The actions and findings with their times.

    They are printed at once, and again after a failure.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.lines: list[str] = []

    def __call__(self, what: str) -> None:
        line = f"{time.monotonic() - self._began:7.1f} s  {what}"
        self.lines.append(line)
        print(line, flush=True)


class Run:
    """One nemesis against one mesh."""

    def __init__(
        self,
        world: Arena,
        witness: Witness,
        clients: Clients,
        reference: fleet.Reference,
        journal: Journal,
    ) -> None:
        self._world, self._witness, self._clients = world, witness, clients
        self._reference, self._journal = reference, journal
        self._books = Books()
        self._canary = random.Random(SEED)
        self._canaries: list[str] = []
        self._armed: set[str] = set()  # processes with a failpoint, which may kill them in any step
        self.num_requests = self.num_errors = 0

    async def step(self, step: Step) -> list[Violation]:
        """Carry out a step, wait until it is over, and return the violations."""
        self._armed |= invariants.armed_by(step)
        await asyncio.gather(*(self._act(after_s, action) for after_s, action in step.actions))
        await asyncio.sleep(_AFTER_S)
        found = await self._come_to_rest()
        await self._clients.pause()
        found += await self._look(step, self._clients.take())
        self._clients.resume()
        return found

    async def _act(self, after_s: float, action: Action) -> None:
        await asyncio.sleep(after_s)
        self._journal(str(action))
        if isinstance(action, Outage) and action.is_wiped:
            self._witness.forget_assignments()
        await self._world.act(action)

    async def _come_to_rest(self) -> list[Violation]:
        """Wait until all processes run and all groups match the desired state.

        Requests continue.
        """
        began = time.monotonic()
        await self._world.mesh.wait_ready(
            [n for n in self._world.mesh.names if not n.startswith("gateway")], _READY_S
        )
        await self._world.uncordon_the_ejected()
        if missing := await within(invariants.SETTLE_S, lambda: invariants.settled(self._world)):
            return [Violation("I8", f"not settled after {invariants.SETTLE_S} s: {missing}")]
        await self._world.mesh.wait_ready(timeout_s=_READY_S)
        self._journal(f"settled after {time.monotonic() - began:.1f} s")
        return []

    async def _look(self, step: Step, asked: list[Asked]) -> list[Violation]:
        """Check the mesh at rest, without requests."""
        found: list[Violation] = []
        replaced, unhit = invariants.count_deaths(self._world, self._books, step, self._armed)
        self._armed -= set(replaced) - invariants.armed_by(step)
        found += [Violation("I8", f"{name} was replaced although it was not hit") for name in unhit]
        num_lost = invariants.lost(step, replaced)
        found += await asyncio.to_thread(
            invariants.judge_requests, asked, step, num_lost, self._reference
        )
        if missing := await within(
            invariants.QUIESCE_S,
            lambda: invariants.nothing_held(self._world, self._witness.records),
        ):
            found.append(Violation("I4", f"held without a request: {missing}"))
        found += await asyncio.to_thread(
            invariants.count_requests, self._world, self._books, asked, step
        )
        found += invariants.count_files(self._world, self._books)
        found += await self._watch_consumers()
        found += self._witness.take()
        canary = f"canary {self._canary.getrandbits(256):064x} " * 4
        self._canaries.append(canary[:40])
        found += await invariants.asks_again(self._world, canary, self._reference)
        await asyncio.to_thread(invariants.note_requests, self._world, self._books)
        secrets = [*self._canaries[-3:], *self._world.keys.values()]
        found += await asyncio.to_thread(
            invariants.scan_logs, self._world.log_dir, self._books, secrets
        )
        self._tell(step, asked, replaced)
        return found

    async def _watch_consumers(self) -> list[Violation]:
        """Check that the watches of a killed process in NATS end soon (I4)."""
        missing = await within(
            invariants.QUIESCE_S, lambda: invariants.too_many_consumers(self._world, self._books)
        )
        return [Violation("I4", missing)] if missing else []

    def _tell(self, step: Step, asked: list[Asked], replaced: list[str]) -> None:
        ends = [each.outcome for each in asked if each.outcome is not None]
        errors = Counter(
            str(o.error.get("code")) if o.error else "cut" for o in ends if not o.is_complete
        )
        gap_s = max((outcome.longest_gap_s for outcome in ends), default=0.0)
        self.num_requests += len(asked)
        self.num_errors += errors.total()
        self._journal(
            (
                f"step {step.number}: {len(asked)} requests, not answered whole: "
                f"{dict(errors) or 0}, longest gap {gap_s:.2f} s"
            )
            + (f"; started anew: {', '.join(replaced)}" if replaced else "")
        )


@pytest.mark.req("S10", "S36", "S37", "S71", "S74", "S79")
@pytest.mark.fault("F42", "F1", "F11", "F12", "F13", "F18", "F19", "F21", "F37")
async def test_every_invariant_holds_under_random_faults(tmp_path: Path) -> None:
    journal = Journal()
    journal(f"CHAOS_SEED={SEED} CHAOS_S={DURATION_S:g}, logs in {tmp_path}")
    reference = fleet.Reference.load(tmp_path / "model")
    async with arena(tmp_path, journal) as world, Witness(world.bus) as witness:
        assert not await within(invariants.SETTLE_S, lambda: invariants.settled(world))
        async with Clients(
            world.mesh.http_url, SEED, [*world.keys.values()], give_up_share=0.1
        ) as clients:
            await until(lambda: clients.num_asked > 5)
            run = Run(world, witness, clients, reference, journal)
            began = time.monotonic()
            for step in steps(SEED):
                if time.monotonic() - began > DURATION_S:
                    break
                found = await run.step(step)
                for violation in found:
                    journal(f"VIOLATED {violation}")
                if found:
                    pytest.fail(_report(found, journal, tmp_path), pytrace=False)
        journal(
            f"{step.number - 1} steps, {run.num_requests} requests, {run.num_errors} not answered "
            "whole; "
            f"{witness.num_pairs} pairs and {witness.num_leaders_asked} times both masters looked "
            "at"
        )


def _report(found: list[Violation], journal: Journal, directory: Path) -> str:
    return "\n".join(
        [
            *journal.lines,
            "",
            *map(str, found[:20]),
            f"again: make chaos CHAOS_SEED={SEED}; logs: {directory}",
        ]
    )
