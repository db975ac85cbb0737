"""Checks the invariants I1 to I9 after each step of random faults and orders.

Each check names its invariant. Most checks need the whole mesh at rest. The module `witness` checks
the invariants that must hold at any moment (I3, I7).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.error import URLError

import httpx

from loadtests.faults.leak import gauges, held
from pdmesh.core.groups.desired import SERVING_ROLES
from pdmesh.core.model import Role
from pdmesh.desired_file import read
from pdmesh.errors import MeshError
from pdmesh.instance.incarnation.assignment import ROLES
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, InstanceRecord
from tests.chaos.nemesis.actions import Freeze, Signal
from tests.chaos.nemesis.arena import TENANTS, Arena
from tests.chaos.nemesis.plan import GATEWAYS, INSTANCES, Step
from tests.chaos.nemesis.witness import Violation
from tests.support.attack.steady_clients import Asked
from tests.support.sites import fleet
from tests.support.streams import StreamOutcome

SLACK_S: Final = 1.5  # for a loaded machine with two cores, as in the kill matrix
GAP_S: Final = 4.5  # the longest silence that one lost instance may cause for a client (F8)
SETTLE_S: Final = 45.0  # until every group matches the desired state
QUIESCE_S: Final = 16.0  # the ticket lease of 10 s, the registry lease of 3 s, and a little more
AGAIN_S: Final = 5.0  # until a new request works (I8)
FILE_SLACK: Final = 48
CONSUMER_SLACK: Final = 12  # instances with a role watch more streams than blank ones
_CANARY_TOKENS: Final = 4
# The errors that docs/api.md documents for a request that fails because of instances or gateways.
# The error `internal` would be a bug.
ERRORS: Final = frozenset(
    {
        "overloaded", "ttft_unreachable", "queue_full", "no_instance", "draining",
        "upstream_failed", "engine_failed",
        "engine_died", "kv_transfer_failed", "kv_transfer_timeout", "poison_request",
    }
)  # fmt: skip
_BUGS: Final = re.compile(
    rb'"event": ?"(rpc\.bug|groups\.bug|plans\.bug|[a-z_.]*\.died)"'
    rb"|never retrieved|Traceback \(most"
)
_EXPECTED_DEATHS: Final = (b"engine.died",)  # a failpoint causes this death


@dataclass
class Books:
    """Counts of earlier steps, with which later counts are compared."""

    pids: dict[str, int] = field(default_factory=dict)
    files: dict[int, int] = field(
        default_factory=dict
    )  # the open files of each process by pid, at its first rest
    # The number of requests that each gateway process has ended, by pid.
    requests: dict[int, float] = field(default_factory=dict)
    consumers: int = 0  # the consumers of NATS streams, at the first rest
    read: dict[Path, int] = field(default_factory=dict)  # how far each log was scanned


async def within(seconds: float, condition: Callable[[], Awaitable[str]]) -> str:
    """Wait for at most `seconds` until `condition()` returns an empty string; returns its last
    result.
    """
    deadline = time.monotonic() + seconds
    while missing := await condition():
        if time.monotonic() > deadline:
            return missing
        await asyncio.sleep(0.1)
    return ""


# --- at any time ---------------------------------------------------------------------------------


def judge_requests(
    asked: Iterable[Asked], step: Step, num_lost: int, reference: fleet.Reference
) -> list[Violation]:
    """Check I1 and I2 on the requests of a step.

    `num_lost` is the number of instances that were hit or died in the step. No request may fail
    because of a single lost instance.
    """
    gateways = [fault for fault in step.faults if fault.target in GATEWAYS]
    frozen_s = sum(f.for_s for f in gateways if isinstance(f, Freeze))
    gap_s = GAP_S * max(1, num_lost) + frozen_s + SLACK_S
    found: list[Violation] = []
    for each in asked:
        outcome = each.outcome
        if each.gave_up:
            continue
        if outcome is None:
            found.append(Violation("I1", f"a request of {each.max_tokens} tokens never ended"))
        elif wrong := outcome.fault_in_ending():
            found.append(Violation("I1", wrong))
        elif outcome.is_complete:
            found += _judge_answer(each, outcome, gap_s, reference)
        elif not _is_beginning(each, outcome, reference):
            found.append(
                Violation("I2", f"{outcome.text!r} is not the beginning of the right text")
            )
        elif outcome.error is None and not gateways:
            found.append(Violation("I1", "cut off, although no gateway was hit"))
        elif outcome.error is not None:
            found += _judge_error(outcome, may_fail=bool(gateways) or num_lost > 1)
    return found


def _judge_answer(
    asked: Asked, outcome: StreamOutcome, gap_s: float, reference: fleet.Reference
) -> Iterator[Violation]:
    expected = reference.text(list(asked.prompt), asked.max_tokens)
    if outcome.text != expected:
        yield Violation("I2", f"{outcome.text!r} instead of {expected!r}")
    if outcome.longest_gap_s > gap_s:
        yield Violation("I1", f"silent for {outcome.longest_gap_s:.1f} s, bound {gap_s} s")


def _is_beginning(asked: Asked, outcome: StreamOutcome, reference: fleet.Reference) -> bool:
    return reference.text(list(asked.prompt), asked.max_tokens).startswith(outcome.text)


def _judge_error(outcome: StreamOutcome, *, may_fail: bool) -> Iterator[Violation]:
    assert outcome.error is not None
    code = str(outcome.error.get("code"))
    if code not in ERRORS:
        yield Violation("I1", f"{outcome.status} {outcome.error}")
    elif not may_fail:
        yield Violation("I1", f"{code}, although another instance could serve it")


def scan_logs(directory: Path, books: Books, secrets: Iterable[str]) -> list[Violation]:
    """Check that no log has a prompt or a key (I9), or a line that only a bug writes (I1)."""
    found: list[Violation] = []
    hidden = [secret.encode() for secret in secrets]
    for path in sorted(directory.glob("*.log")):
        begin = books.read.get(path, 0)
        with path.open("rb") as file:
            begin = begin if path.stat().st_size >= begin else 0  # the log was truncated since
            file.seek(begin)
            data = file.read()
        books.read[path] = begin + len(data)
        found += [Violation("I9", f"{path.name} holds a secret") for s in hidden if s in data]
        for line in data.splitlines():
            if _BUGS.search(line) and not any(known in line for known in _EXPECTED_DEATHS):
                found.append(
                    Violation("I1", f"{path.name}: {line[:1500].decode(errors='replace')}")
                )
    return found


# --- at rest -------------------------------------------------------------------------------------


async def settled(arena: Arena) -> str:
    """The first difference from the desired state. Empty if there is none (I8)."""
    try:
        states = await arena.operator.groups()
        desired = await arena.operator.desired()
    except MeshError as exc:
        return exc.message
    if states.paused:
        return f"paused: {states.paused}"
    arena.follow(desired)
    if desired.text != arena.text:
        return f"the desired state is {desired.text!r} instead of {arena.text!r}"
    wanted = read(desired.text).groups
    for group in states.groups:
        if group.group_id not in wanted:
            return f"the group {group.group_id} still exists"
        ready = Counter(ROLES[m.role] for m in group.members if m.phase == INSTANCE_PHASE_READY)
        shall = {role: wanted[group.group_id].num(role) for role in SERVING_ROLES}
        if group.state != "serving" or ready != Counter({r: n for r, n in shall.items() if n}):
            return f"{group.group_id} is {group.state} with {_named(ready)}: {group.detail}"
    return "" if len(states.groups) == len(wanted) else "a group is missing"


def _named(counts: Counter[Role]) -> str:
    return ", ".join(f"{number} {role.value}" for role, number in sorted(counts.items(), key=str))


async def nothing_held(arena: Arena, records: Mapping[str, InstanceRecord]) -> str:
    """Check that everything is free when no request runs (I4).

    This includes slots, tickets, arenas, pulls, waiting rooms, legs and KV blocks. Returns what is
    still held, or an empty string.
    """
    with contextlib.suppress(URLError, ValueError, OSError):
        rest = await asyncio.to_thread(held, arena.mesh, [*INSTANCES, *GATEWAYS])
        serving = [r for r in records.values() if r.phase == INSTANCE_PHASE_READY]
        for record in serving:
            free = await asyncio.to_thread(_blocks_free, arena, record.instance_id)
            if free != record.num_kv_blocks:
                rest[record.instance_id] = {"blocks": record.num_kv_blocks - free}
        return json.dumps(rest) if rest else ""
    return "a process does not answer"


def _blocks_free(arena: Arena, instance_id: str) -> float:
    shown = gauges(arena.mesh, instance_id)
    return sum(v for n, v in shown.items() if n.startswith("pdmesh_kv_blocks_free"))


def count_files(arena: Arena, books: Books) -> list[Violation]:
    """Check that the number of a process's open files does not grow (I4)."""
    found: list[Violation] = []
    for name in arena.mesh.names:
        pid = arena.mesh.supervisor.pid(name)
        if pid is None:
            continue
        number = len(os.listdir(f"/proc/{pid}/fd"))
        first = books.files.setdefault(pid, number)
        if number > first + FILE_SLACK:
            found.append(Violation("I4", f"{name} has {number} open files, {first} before"))
    return found


async def too_many_consumers(arena: Arena, books: Books) -> str:
    """A message if NATS has many more consumers than at the first rest. Otherwise empty.

    Watches of dead processes would be additional consumers.
    """
    streams = await arena.bus.client.jetstream().streams_info()
    number = sum(stream.state.consumer_count for stream in streams)
    books.consumers = books.consumers or number
    if number <= books.consumers + CONSUMER_SLACK:
        return ""
    return f"{number} consumers of NATS streams, {books.consumers} at first"


def count_requests(
    arena: Arena, books: Books, asked: Sequence[Asked], step: Step
) -> list[Violation]:
    """Check that gateways accept and end as many requests as clients send (I6).

    A client that gives up early may do so before its request is accepted.
    """
    before, now = books.requests, _ended(arena)
    found = [
        Violation("I6", f"{name} accepted {accepted:g} and ended {now[arena.mesh.pid(name)]:g}")
        for name in GATEWAYS
        if (accepted := _total(arena, name, "pdmesh_requests_accepted_total"))
        != now[arena.mesh.pid(name)]
    ]
    is_hit = any(fault.target in GATEWAYS for fault in step.faults)
    ended = sum(now.values()) - sum(before.values())
    most, num_gave_up = len(asked), sum(each.gave_up for each in asked)
    if before.keys() == now.keys() and not is_hit and not most - num_gave_up <= ended <= most:
        found.append(Violation("I6", f"clients sent {most} requests, gateways ended {ended:g}"))
    return found


def note_requests(arena: Arena, books: Books) -> None:
    """Note the counts of requests before clients continue."""
    books.requests = _ended(arena)


def _ended(arena: Arena) -> dict[int, float]:
    return {arena.mesh.pid(name): _total(arena, name, "pdmesh_requests_total") for name in GATEWAYS}


def _total(arena: Arena, process: str, metric: str) -> float:
    return gauges(arena.mesh, process).get(metric, 0.0)


def count_deaths(
    arena: Arena, books: Books, step: Step, armed: set[str]
) -> tuple[list[str], list[str]]:
    """The processes replaced since the last step, as (all, those that no fault has hit)."""
    now = {n: pid for n in arena.mesh.names if (pid := arena.mesh.supervisor.pid(n)) is not None}
    replaced = [name for name, pid in now.items() if books.pids.get(name, pid) != pid]
    books.pids = now
    hit = {fault.target for fault in step.faults} | armed
    return replaced, [name for name in replaced if name not in hit]


async def asks_again(arena: Arena, prompt: str, reference: fleet.Reference) -> list[Violation]:
    """Check that a new request works soon (I8), and that tenants share no cached prefix (I5)."""
    found: list[Violation] = []
    expected = reference.text(reference.tokenizer.encode(prompt).ids, _CANARY_TOKENS)
    async with httpx.AsyncClient(base_url=arena.mesh.http_url, timeout=20) as client:
        for tenant in TENANTS:
            headers = {"authorization": f"Bearer {arena.keys[tenant]}"}
            tries: list[
                tuple[str, int]
            ] = []  # only a tenant's first request can find blocks of the other tenant

            async def fails(
                headers: dict[str, str] = headers, tries: list[tuple[str, int]] = tries
            ) -> str:
                try:
                    tries.append(await _ask(client, headers, prompt))
                except (httpx.HTTPError, KeyError) as exc:
                    tries.append(("", 0))
                    return repr(exc)
                return ""

            if missing := await within(AGAIN_S + SLACK_S, fails):
                found.append(Violation("I8", f"no new request works: {missing}"))
            elif tries[-1][0] != expected:
                found.append(Violation("I2", f"{tries[-1][0]!r} instead of {expected!r}"))
            if tries[0][1]:
                found.append(
                    Violation("I5", f"{tenant} finds {tries[0][1]} tokens of the other tenant")
                )
    return found


async def _ask(client: httpx.AsyncClient, headers: dict[str, str], prompt: str) -> tuple[str, int]:
    """The answer, and the number of prompt tokens that were cached.

    Raises HTTPStatusError if the request is refused.
    """
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": _CANARY_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = await client.post("/v1/completions", json=body, headers=headers)
    answer.raise_for_status()
    said = answer.json()
    return said["choices"][0]["text"], said["usage"]["prompt_tokens_details"]["cached_tokens"]


def lost(step: Step, replaced: Iterable[str]) -> int:
    """The number of instances that clients may have lost in this step."""
    targets = {fault.target for fault in step.faults} | set(replaced)
    return len(targets & set(INSTANCES))


def armed_by(step: Step) -> set[str]:
    return {f.target for f in step.faults if isinstance(f, Signal) and f.armed}
