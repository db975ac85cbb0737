"""Simulates gateway, master and instances on one virtual clock, each with the product's own core.

The network adds a constant per hop. Load reports and cache deltas reach the master as late as in
the mesh. The gateway's cores are `core.request.machine` and `core.request.waiting_room`. The
master's are `core.placement.plan` and `core.kv.prefix.prefix_index`. The instance's is
`core.instance.admission`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from loadtests.sim.clock import Clock
from loadtests.sim.host_pools import HostPools
from loadtests.sim.worker import Job, Worker
from loadtests.traffic.workloads import Arrival
from pdmesh.core.instance.admission import (
    Admission,
    Admitted,
    Capacity,
    Work,
)
from pdmesh.core.instance.prompt_times import LoadBook
from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.kv.prefix.prefix_index import NO_PEERS, IndexDelta, PrefixIndex
from pdmesh.core.kv.tier import Tier
from pdmesh.core.model import Role, Tick
from pdmesh.core.placement.baselines import POLICIES
from pdmesh.core.placement.fleet import (
    Fleet,
    InstanceRecorded,
    LoadReported,
    PrefillComputed,
)
from pdmesh.core.placement.instance import Identity
from pdmesh.core.placement.plan import (
    DEFAULT_SCENARIO,
    NoPlan,
    Placement,
    Plan,
)
from pdmesh.core.placement.plan import RankedInstance as Ranked
from pdmesh.core.placement.policies import Query, Weights
from pdmesh.core.placement.predictor import PromptTokens
from pdmesh.core.request.events import (
    AskPlan,
    Candidate,
    Complete,
    DecodeTokens,
    Effect,
    Event,
    Fail,
    FirstToken,
    LeaveRoom,
    LegAccepted,
    LegFinished,
    LegKvReceived,
    LegRejected,
    PlanFailed,
    PlanReceived,
    RequestLimits,
    SendPrefill,
    SendStart,
    SlotFreed,
    Submitted,
    TicketHeld,
    WaitForSlot,
    WaitRefused,
)
from pdmesh.core.request.length_batching import MAX_PASSED, LengthWindow
from pdmesh.core.request.machine import Request
from pdmesh.core.request.retry_budget import RetryBudget
from pdmesh.core.request.waiting_room import WaitingRoom
from pdmesh.errors import NoInstance

_HUGE: Final = 1 << 50  # bytes; arenas are never the bottleneck here


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The instances of a mesh and their capacity.

    Blocks have `block_size` tokens. Times are in seconds. A law gives the time that a step takes.
    """

    law: Law
    num_fusion: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    num_blocks: int = 16384
    decode_blocks: int = 0  # blocks of a decode; 0: as many as a prefill has
    decode_law: Law | None = None  # the law of decodes; None: `law`
    block_size: int = 64
    prefill_slots: int = 8
    prefill_batch: int = 0  # as in the gateways' settings
    max_passed: int = MAX_PASSED  # batches that may pass a waiting request; 0: none, so in order
    decode_slots: int = 256
    chunk_tokens: int = 8192
    hop_s: float = 0.0005  # one way between gateway and instance or master
    load_delay_s: float = 0.02
    blocks_delay_s: float = 0.03
    transfer_token_s: float = 5.2e-6  # for the KV of one token: 128 KiB at 25 GB/s
    ttft_slo_s: float = 600.0  # a request that still waits after this time is refused
    max_waiting: int = 100_000
    host_blocks: int = 0  # blocks of each instance's host pool
    shares_host: bool = True  # whether instances fetch from each other's host pools
    tells_peers: bool = True  # whether placement knows the content of other instances' host pools
    tells_host: bool = True  # whether placement knows the content of an instance's own host pool


@dataclass(slots=True)
class Served:
    """The result of one request.

    Times begin at the request's arrival. They are inf if the request did not get that far.
    """

    arrival: Arrival
    ttft_s: float = math.inf
    e2e_s: float = math.inf
    prefill_s: float = 0.0  # the part of ttft_s after the prefill accepted the request (T_p)
    num_cached_tokens: int = 0
    num_rejections: int = 0
    num_migrations: int = 0
    prefill_id: str = ""
    is_refused: bool = False

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / max(1, self.arrival.num_output_tokens - 1)


@dataclass(slots=True)
class _Life:
    """A request under way, as its gateway sees it."""

    served: Served
    request: Request
    request_id: str
    jobs: dict[int, tuple[Worker, Job]] = field(default_factory=dict)
    waiting: int | None = None
    # instance, time of plan, expected time of token 1
    expected: tuple[str, float, float] = ("", 0.0, 0.0)
    tick_at: float = math.inf


class VirtualMesh:
    """A simulated mesh.

    `run` plays arrivals. Then `served` and `workers` have the results.
    """

    def __init__(self, shape: MeshShape, policy: str, seed: int, weights: Weights) -> None:
        self.shape, self.clock = shape, Clock()
        self.fleet, self.index = Fleet(), PrefixIndex()
        self.placement = Placement(
            self.fleet, random.Random(seed), POLICIES[policy](), weights, max_candidates=8
        )
        block_s = shape.law.prefill_s(shape.block_size) - shape.law.prefill_fixed_s
        self.host_pools = HostPools(shape.host_blocks, block_s, shape.shares_host)
        self.workers: dict[str, Worker] = {}
        self.served: list[Served] = []
        self.errors: list[float] = []  # relative errors of predicted prefill times, in order
        # relative errors of the waits for token 1 that plans expected
        self.wait_errors: list[float] = []
        window = None
        if shape.prefill_batch > 1:
            window = LengthWindow(shape.prefill_batch, shape.max_passed)
        self._room: WaitingRoom[_Life] = WaitingRoom(shape.max_waiting, window=window)
        self._keys = itertools.count(1)
        self._budget = RetryBudget()
        self._limits = RequestLimits(
            deadline_s=1e9, ttft_s=shape.ttft_slo_s, answer_s=1e9, stall_s=1e9
        )
        self._sequences: dict[str, int] = {}
        self._dirty: set[str] = set()
        self._books: dict[str, LoadBook] = {}
        self._reporting: set[str] = set()
        for role, count in (
            (Role.FUSION, shape.num_fusion),
            (Role.PREFILL, shape.num_prefill),
            (Role.DECODE, shape.num_decode),
        ):
            for number in range(count):
                self.add(f"{role.value}-{number}", role)

    def add(
        self,
        name: str,
        role: Role,
        group_id: str = "g0",
        scenario: str = DEFAULT_SCENARIO,
        region: str = "",
    ) -> None:
        """Add an instance that serves from now on.

        If `region` is given, the instance's KV stays in this region.
        """
        shape = self.shape
        work = {Role.FUSION: Work.LOCAL, Role.PREFILL: Work.PREFILL, Role.DECODE: Work.DECODE}[role]
        num_slots = shape.prefill_slots if role is Role.PREFILL else shape.decode_slots
        num_blocks = shape.num_blocks
        if role is Role.DECODE:
            num_blocks = shape.decode_blocks or num_blocks
        self._books[name] = LoadBook()
        capacity = Capacity(
            works=frozenset({work}),
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_size=shape.block_size,
            block_bytes=1,
            max_model_len=1 << 30,
            staging_bytes=_HUGE,
            landing_bytes=_HUGE,
            max_retrievals=num_slots,
        )
        self.workers[name] = Worker(
            name,
            work,
            self.clock,
            (shape.decode_law if role is Role.DECODE else None) or shape.law,
            Admission(capacity),
            shape.chunk_tokens,
            self._on_computed,
            self._on_blocks,
            self.host_pools,
        )
        identity = Identity(
            name,
            1,
            role,
            group_id,
            scenario,
            "m",
            "f",
            shape.block_size,
            num_slots,
            num_blocks,
            0,
            fetches_from_peers=bool(shape.host_blocks) and shape.shares_host,
            region=region,
            kv_region=region,
        )
        self.fleet.handle(InstanceRecorded(identity), self.clock.now)

    def run(self, arrivals: Sequence[Arrival]) -> None:
        for number, arrival in enumerate(arrivals):
            self.clock.at(arrival.at_s, partial(self.submit, number, arrival))
        self.clock.run()

    def ended(self, served: Served) -> None:
        """A hook for subclasses, called when a request was answered or refused."""

    def placed(self, served: Served, plan: Plan) -> None:
        """A hook for subclasses, called each time the master has ranked candidates for a
        request.
        """

    def scenario_of(self, arrival: Arrival) -> str:
        """The scenario whose instances a request may use. In this class, all serve one scenario."""
        return DEFAULT_SCENARIO

    def region_of(self, arrival: Arrival) -> str:
        """The region in which a request arrives. In this class, there are no regions."""
        return ""

    # --- the gateway -----------------------------------------------------------------------------

    def submit(self, number: int, arrival: Arrival) -> None:
        """Start a request now."""
        request = Request(
            max(1, arrival.num_output_tokens),
            limits=self._limits,
            budget=self._budget,
            next_key=lambda: next(self._keys),
            num_prompt_tokens=arrival.num_prompt_tokens,
        )
        life = _Life(Served(arrival), request, f"r{number}")
        self.served.append(life.served)
        self._handle(life, Submitted())

    def _handle(self, life: _Life, event: Event) -> None:
        for effect in life.request.handle(event, self.clock.now):
            self._act(life, effect)
        due = life.request.wake_at
        if due < life.tick_at and due < 1e8:
            life.tick_at = due
            self.clock.at(due, partial(self._tick, life, due))

    def _tick(self, life: _Life, due: float) -> None:
        if life.tick_at == due:
            life.tick_at = math.inf
            self._handle(life, Tick())

    def _later(self, life: _Life, event: Event) -> None:
        self.clock.after(self.shape.hop_s, lambda: self._handle(life, event))

    def _act(self, life: _Life, effect: Effect) -> None:
        match effect:
            case AskPlan():
                self.clock.after(self.shape.hop_s, lambda: self._plan(life, effect))
            case SendPrefill():
                self.clock.after(self.shape.hop_s, lambda: self._prefill(life, effect))
            case SendStart():
                self.clock.after(self.shape.hop_s, lambda: self._start(life, effect))
            case WaitForSlot():
                self._wait(life, effect)
            case LeaveRoom() if life.waiting is not None:
                self._room.leave(life.waiting)
                life.waiting = None
            case Complete():
                life.served.e2e_s = self.clock.now - life.served.arrival.at_s
                life.served.num_rejections = life.request.num_rejections
                life.served.num_migrations = life.request.num_migrations
                self._note_session(life.served)
                self.ended(life.served)
            case Fail():
                life.served.is_refused = True
                life.served.num_rejections = life.request.num_rejections
                self.ended(life.served)
            case _:
                pass

    def _note_session(self, served: Served) -> None:
        """Forward the client's hint about its session to the prefill."""
        arrival, prefill = served.arrival, served.prefill_id
        state, pools = arrival.session_state, self.host_pools
        if state is None:
            return

        def hear() -> None:
            pools.note_session(prefill, state, arrival.chat_id, arrival.blocks, self.clock.now)

        self.clock.after(self.shape.hop_s, hear)

    def _wait(self, life: _Life, effect: WaitForSlot) -> None:
        joined = self._room.join(
            life, effect.instance_ids, effect.until, num_tokens=effect.num_tokens
        )
        if joined is None:
            self._later(life, WaitRefused())
            return
        life.waiting = joined.number
        if joined.evicted is not None:
            joined.evicted.waiting = None
            self._later(joined.evicted, WaitRefused())

    # --- the master ------------------------------------------------------------------------------

    def _plan(self, life: _Life, ask: AskPlan) -> None:
        arrival = life.served.arrival
        query = Query(
            model="m",
            block_hashes=arrival.blocks,
            num_prompt_tokens=arrival.num_prompt_tokens,
            max_tokens=arrival.num_output_tokens,
            chat_id=arrival.chat_id,
            request_id=life.request_id,
            scenario=self.scenario_of(arrival),
            excluded=frozenset(ask.excluded),
            region=self.region_of(arrival),
        )
        tier = None if self.shape.tells_host else Tier.ENGINE
        matches = self.index.match(arrival.blocks, tier)
        peers = self.index.peer_runs(arrival.blocks) if self.shape.tells_peers else NO_PEERS
        plan = self.placement.plan(
            query, matches, self.clock.now, peers, num_cached=self.index.num_blocks_of
        )
        if isinstance(plan, NoPlan):
            self._later(life, PlanFailed(ask.plan, NoInstance(plan.message)))
            return
        best = plan.prefills[0].instance_id
        life.expected = best, self.clock.now, self.fleet.instances[best].available_at
        self.placed(life.served, plan)
        self._later(life, _received(ask, plan))

    def _report_soon(self, worker: Worker) -> None:
        name = worker.instance_id
        if name not in self._reporting:
            self._reporting.add(name)
            self.clock.after(self.shape.load_delay_s, lambda: self._report(worker))

    def _report(self, worker: Worker) -> None:
        name, admission = worker.instance_id, worker.admission
        self._reporting.discard(name)
        admitted, ended = self._books[name].take()
        computed = [
            PrefillComputed(
                p.request_id,
                p.num_tokens,
                p.num_cached_tokens,
                p.seconds,
                p.num_steps,
                p.num_beside,
            )
            for p in ended
        ]
        self._compare(name, computed)
        self.fleet.handle(
            LoadReported(
                name,
                1,
                admission.capacity.num_slots,
                admission.num_slots_used,
                admission.num_blocks_free,
                False,
                admitted,
                computed,
            ),
            self.clock.now,
        )

    def _compare(self, name: str, computed: Sequence[PrefillComputed]) -> None:
        """Record the predictor's error, before the predictor learns from these prompts."""
        instance = self.fleet.instances[name]
        fit = self.fleet.predictor.fit(instance.kind)
        prompts = list(instance.untimed)
        for each in computed:
            if each.num_tokens:
                prompts.append(PromptTokens(each.num_tokens, each.num_cached_tokens))
            if each.seconds > 0 and prompts:
                found = fit.span_s(prompts, each.num_steps, each.num_beside or 0.0)
                self.errors.append(abs(instance.slowness * found - each.seconds) / each.seconds)
                prompts.clear()

    def _on_blocks(self, worker: Worker) -> None:
        name = worker.instance_id
        if name not in self._dirty:
            self._dirty.add(name)
            self.clock.after(self.shape.blocks_delay_s, lambda: self._publish_blocks(worker))

    def _publish_blocks(self, worker: Worker) -> None:
        name = worker.instance_id
        self._dirty.discard(name)
        stored, removed = worker.pool.take_changes()
        sequence = self._sequences[name] = self._sequences.get(name, 0) + 1
        host = self.host_pools.take_changes(name)
        self.index.apply(IndexDelta(name, 1, sequence, removed, stored, host=host))

    # --- instances -------------------------------------------------------------------------------

    def _on_computed(self, worker: Worker, job: Job, seconds: float) -> None:
        book = self._books[worker.instance_id]
        book.computed(job.leg, job.num_cached, self.clock.now)
        if worker.work is Work.LOCAL:
            book.decodes(job.leg, self.clock.now)
        self._report_soon(worker)

    def _prefill(self, life: _Life, send: SendPrefill) -> None:
        worker, arrival = self.workers[send.to.instance_id], life.served.arrival
        job = Job(
            send.key,
            life.request_id,
            arrival.num_prompt_tokens,
            arrival.num_output_tokens,
            arrival.blocks,
            lambda: self._on_first(life, send.key),
            lambda: self._on_end(life, send.key),
        )
        self._offer(life, worker, job)

    def _offer(self, life: _Life, worker: Worker, job: Job) -> None:
        answer = worker.offer(job)
        if not isinstance(answer, Admitted):
            self._later(life, LegRejected(job.leg, answer.retry_after_ms / 1000))
            return
        life.jobs[job.leg] = (worker, job)
        num_prompt = 0 if worker.work is Work.DECODE else job.num_prompt
        book = self._books[worker.instance_id]
        book.admitted(job.leg, life.request_id, num_prompt, self.clock.now)
        self._report_soon(worker)
        self._later(life, LegAccepted(job.leg))

    def _on_first(self, life: _Life, key: int) -> None:
        worker, job = life.jobs[key]
        served = life.served
        if not life.request.is_current(key):  # the request gave up while its offer was under way
            if worker.work is Work.PREFILL:
                self._release(worker, life.jobs.pop(key)[1])
            return
        self._note_wait(life, worker.instance_id)
        served.num_cached_tokens = job.num_cached
        served.prefill_id = worker.instance_id
        served.prefill_s = self.clock.now - job.began_at
        if math.isinf(served.ttft_s):  # a migrated request has had its first token already
            served.ttft_s = self.clock.now + self.shape.hop_s - served.arrival.at_s
        is_local = worker.work is Work.LOCAL
        is_last = life.served.arrival.num_output_tokens <= 1 and not is_local
        ticket = None if is_local or is_last else TicketHeld(f"t{key}", 1e9)
        finish = "length" if is_last else None
        if is_last:
            self._release(worker, job)
        self._later(life, FirstToken(key, 0, finish, ticket, job.num_cached))  # type: ignore[arg-type]

    def _note_wait(self, life: _Life, instance_id: str) -> None:
        """Record the error of the expected time of token 1.

        There is no error if the request went to another instance than planned.
        """
        best, planned_at, due = life.expected
        if best == instance_id:
            waited_s = self.clock.now - planned_at
            self.wait_errors.append(abs(due - self.clock.now) / waited_s)

    def _start(self, life: _Life, send: SendStart) -> None:
        worker, arrival = self.workers[send.to.instance_id], life.served.arrival
        job = Job(
            send.key,
            life.request_id,
            arrival.num_prompt_tokens,
            arrival.num_output_tokens,
            (),
            lambda: None,
            lambda: self._on_end(life, send.key),
        )
        prefill = int(send.ticket.ticket_id[1:])
        self._offer(life, worker, job)
        if send.key in life.jobs:
            delay = self.shape.transfer_token_s * arrival.num_prompt_tokens
            self.clock.after(delay, lambda: self._on_taken(life, send.key, prefill))

    def _on_taken(self, life: _Life, key: int, prefill_key: int) -> None:
        worker, job = life.jobs.pop(prefill_key)
        self._release(worker, job)
        decode, waiting = life.jobs[key]
        decode.admission.computed(key)
        decode.begin(waiting)
        self._books[decode.instance_id].decodes(key, self.clock.now)
        self._later(life, LegKvReceived(key))

    def _release(self, worker: Worker, job: Job) -> None:
        worker.release(job)
        self._slot_freed(worker)

    def _on_end(self, life: _Life, key: int) -> None:
        worker, _ = life.jobs.pop(key)
        self._books[worker.instance_id].ended(key, self.clock.now)
        num_left = life.request.num_remaining
        self._later(life, DecodeTokens(key, [0] * num_left))
        self._later(life, LegFinished(key, "length"))
        self._slot_freed(worker)

    def _slot_freed(self, worker: Worker) -> None:
        self._report_soon(worker)
        self.clock.after(self.shape.hop_s, lambda: self._call(worker))

    def _call(self, worker: Worker) -> None:
        free = worker.admission.capacity.num_slots - worker.admission.num_slots_used
        for life in self._room.call(worker.instance_id, free):
            life.waiting = None
            self._handle(life, SlotFreed(worker.instance_id))


def _received(ask: AskPlan, plan: Plan) -> PlanReceived:
    return PlanReceived(
        ask.plan,
        [_candidate(c, not plan.decodes) for c in plan.prefills],
        [_candidate(c, False) for c in plan.decodes],
    )


def _candidate(ranked: Ranked, is_local: bool) -> Candidate:
    return Candidate(
        ranked.instance_id, ranked.incarnation, "p", is_local, ranked.num_matched_tokens
    )
