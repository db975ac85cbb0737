"""The worker's half of the hand-over, without vLLM: incoming and outgoing KV."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.cache_groups import STATE_WINDOW, CacheGroups
from pdmesh.core.kv.layout.rank_place import RankPlace
from pdmesh.core.kv.transfer.source_exclusions import KvSource, KvSources
from pdmesh.core.kv.transfer.ticket import PullFailure, Ticket
from pdmesh.engine.vllm.connector.scheduler.handoff import (
    Entered,
    KvLoad,
    Store,
    StorePart,
)
from pdmesh.engine.vllm.messages import (
    Arrived,
    Open,
    PullFailed,
    Pulling,
    RankLandingFreed,
    RankMessage,
    RankTicketClosed,
    RankTicketOpened,
    Received,
)
from pdmesh.errors import KvTransferFailed

pytest.importorskip("torch")

from pdmesh.engine.vllm.connector.worker import incoming
from pdmesh.engine.vllm.connector.worker.group_caches import GroupCaches
from pdmesh.engine.vllm.connector.worker.incoming import IncomingKv
from pdmesh.engine.vllm.connector.worker.outgoing import Outgoing
from pdmesh.engine.vllm.connector.worker.piece_pulls import Share
from pdmesh.kv.agent.types import PullResult

NUM_LAYERS, NUM_BLOCKS, WIDTH = 3, 8, 16
ONE = CacheGroups(4)


ALL_CAME = PullResult(2 * NUM_LAYERS * WIDTH, 0.0)  # the result of a pull of two blocks


class Caches:
    """Every byte of block b in layer l is 10 l + b."""

    num_layers, num_heads, block_bytes = NUM_LAYERS, 1, WIDTH

    def wait_for_model(self) -> None: ...

    def __init__(self) -> None:
        self.scattered: list[tuple[Any, ...]] = []

    def gather_layer(
        self, layer: int, block_ids: Any, out: Any, on_done: Any = lambda: None
    ) -> None:
        if out.size != len(block_ids) * WIDTH:
            raise ValueError("sizes")
        out.reshape(-1, WIDTH)[:] = np.array([[10 * layer + b] for b in block_ids], np.uint8)
        on_done()

    def gather(self, block_ids: Any, out: Any, on_done: Any) -> None:
        for layer, part in enumerate(np.split(out, NUM_LAYERS)):
            self.gather_layer(layer, block_ids, part)
        on_done()

    def scatter(self, source: Any, block_ids: Any) -> None: ...

    def scatter_part(self, data: Any, offset: int, block_ids: Any, heads: Any) -> None:
        assert heads is None, "the sender has as many ranks"
        self.scattered.append((offset, data.size, tuple(block_ids)))

    def scatter_layer(
        self, layer: int, data: Any, offset: int, block_ids: Any, heads: Any = None
    ) -> None:
        self.scattered.append((layer, offset, data.size, tuple(block_ids)))


class Agent:
    """Stands in for a KV agent. The test decides when a pull ends."""

    def __init__(self) -> None:
        self.arena = np.zeros(4096, np.uint8)
        self.said: list[tuple[Any, ...]] = []
        self.pulls: dict[str, Future[Any]] = {}
        self.on_range: dict[str, Any] = {}
        self.options: dict[str, dict[str, Any]] = {}

    def staging(self, r: ArenaRange) -> Any:
        return self.arena[r.offset : r.offset + r.length]

    landing = staging

    def open(self, ticket_id: str, *_: object) -> Future[None]:
        self.said.append(("open", ticket_id))
        return _done()

    def stage(self, ticket_id: str, *_: object) -> Future[None]:
        self.said.append(("stage", ticket_id))
        return _done()

    def ready(self, ticket_id: str, num_layers: int) -> None:
        self.said.append(("ready", ticket_id, num_layers))

    def release(self, ticket_id: str) -> None:
        self.said.append(("release", ticket_id))

    def keep(self, ticket: Ticket, for_s: float) -> None:
        self.said.append(("keep", ticket.ticket_id))

    def stop_renewing(self, ticket_id: str) -> None:
        self.said.append(("stop_renewing", ticket_id))

    def expect(self, ticket_id: str, stall_s: float) -> None:
        self.said.append(("expect", ticket_id, stall_s))

    def pull(self, ticket: Ticket, *_: object, on_range: Any = None, **more: Any) -> Future[Any]:
        self.options[ticket.ticket_id] = more
        self.on_range[ticket.ticket_id] = on_range
        pull: Future[Any] = Future()
        self.pulls[ticket.ticket_id] = pull
        return pull


def _done() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


class Rank:
    def __init__(
        self, max_pulls: int = 1, groups: CacheGroups = ONE, group_of: tuple[int, ...] = (0, 0, 0)
    ) -> None:
        self.agent, self.caches, self.sent = Agent(), Caches(), list[RankMessage]()
        paged: Any = self.caches
        agent: Any = self.agent
        caches = GroupCaches(paged, groups, group_of, "fp")
        self.incoming = IncomingKv(
            Share(1, RankPlace(0, 1)), caches, agent, max_pulls, self.sent.append
        )
        self.outgoing = Outgoing(0, caches, agent, self.sent.append)

    def heard(self) -> list[RankMessage]:
        sent, self.sent[:] = list(self.sent), []
        return sent


def load(n: int, *, is_early: bool = False, block_ids: tuple[int, ...] = (5, 6)) -> KvLoad:
    ticket = Ticket(f"t{n}", "r", 0, "prefill-0", 7, "fp", 8, 128, ("addr",), 5000)
    landing = ArenaRange(128 * n, 128)
    num_local = 0 if block_ids else 2
    ids = (block_ids,) if block_ids else ()
    return KvLoad(f"k{n}", n, ticket, landing, 1e9, 8, is_early, num_local, ids)


def test_a_pull_without_bytes_frees_its_landing_without_a_step_of_vllm() -> None:
    """All blocks were cached, and the answer is one token. So vLLM may be idle when the
    acknowledgement is sent.
    """
    rank = Rank()
    rank.incoming.pull(load(3, block_ids=()))
    rank.agent.pulls["t3"].set_result(PullResult(0, 0.0))
    assert rank.heard() == [RankLandingFreed(0, 3)]


@pytest.mark.req("S52")
def test_ranges_are_scattered_as_they_land_and_the_last_one_completes_the_load() -> None:
    rank = Rank()
    rank.incoming.pull(load(1))
    rank.agent.on_range["t1"](32, np.zeros(16, np.uint8))
    assert rank.caches.scattered == [(32, 16, (5, 6))]
    assert rank.incoming.take_results() == (set(), set())
    rank.agent.pulls["t1"].set_result(ALL_CAME)
    assert rank.incoming.take_results() == ({"k1"}, set())
    rank.incoming.entered(Entered(1, 0))
    pulling, arrived, freed, received = rank.heard()
    assert (pulling, arrived, freed) == (Pulling(0, 1), Arrived(0, 1), RankLandingFreed(0, 1))
    assert isinstance(received, Received)
    assert received.kv_bytes == 2 * NUM_LAYERS * WIDTH


@pytest.mark.req("S53")
def test_an_empty_step_waits_for_the_first_load_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "_EMPTY_STEP_S", 600.0)
    rank = Rank()
    with ThreadPoolExecutor() as steps:
        assert steps.submit(rank.incoming.take_results, True).result(60.0) == (set(), set())
        rank.incoming.pull(load(1))
        assert steps.submit(rank.incoming.take_results).result(60.0) == (set(), set())
        step = steps.submit(rank.incoming.take_results, True)
        rank.agent.pulls["t1"].set_result(ALL_CAME)
        assert step.result(60.0) == ({"k1"}, set())
        rank.incoming.pull(load(2, is_early=True))
        rank.agent.pulls["t2"].set_result(ALL_CAME)
        step = steps.submit(rank.incoming.take_results, True)
        rank.incoming.join(2, 77)
        assert step.result(60.0) == ({"k2"}, set())
        rank.incoming.pull(load(3))
        step = steps.submit(rank.incoming.take_results, True)
        rank.agent.pulls["t3"].set_exception(KvTransferFailed("x", reason="KV_PEER_LOST"))
        assert step.result(60.0) == (set(), {"k3"})


@pytest.mark.req("S53")
def test_pulls_run_in_turn_and_the_end_of_one_starts_the_next() -> None:
    rank = Rank(max_pulls=1)
    for n in (1, 2, 3):
        rank.incoming.pull(load(n))
    assert list(rank.agent.pulls) == ["t1"]
    assert rank.heard() == [Pulling(0, 1)]
    assert rank.agent.said == [("keep", "t2"), ("keep", "t3")]
    rank.agent.pulls["t1"].set_exception(KvTransferFailed("x", reason="KV_PEER_LOST"))
    assert list(rank.agent.pulls) == ["t1", "t2"]
    failed, pulling = rank.heard()
    assert isinstance(failed, PullFailed)
    assert pulling == Pulling(0, 2)
    assert rank.incoming.take_results() == (set(), {"k1"})
    assert rank.heard() == [], "everything was reported already"
    rank.incoming.cancel(load(3))
    assert rank.incoming.take_results() == (set(), {"k3"})
    assert rank.heard() == [RankLandingFreed(0, 3)]
    assert rank.agent.said[-1] == ("stop_renewing", "t3")
    rank.agent.pulls["t2"].set_result(ALL_CAME)
    assert rank.incoming.take_results() == ({"k2"}, set())


@pytest.mark.fault("F23", "F24")
def test_an_overdue_load_fails_without_a_strike_against_its_source() -> None:
    rank = Rank(max_pulls=1)
    rank.incoming.pull(load(1))
    rank.incoming.pull(replace(load(2), timeout_s=0.0))
    assert rank.incoming.take_results() == (set(), {"k2"})
    pulling, failed, freed = rank.heard()
    assert (pulling, freed) == (Pulling(0, 1), RankLandingFreed(0, 2))
    assert isinstance(failed, PullFailed)
    assert failed.cause == PullFailure.OVERDUE
    assert rank.agent.said[-1] == ("stop_renewing", "t2")
    assert KvSources().failed(KvSource("prefill-0", 7), failed.cause, 0.0) is None
    rank.agent.pulls["t1"].set_result(ALL_CAME)
    assert rank.incoming.take_results() == ({"k1"}, set())


@pytest.mark.fault("F23", "F24")
def test_all_overdue_loads_leave_the_queue_and_none_of_them_begins() -> None:
    """When load 2 leaves the queue, there is room for load 3, which is overdue, too. If load 3 were
    pulled and abandoned, its bytes could be written into a range that now belongs to another load.
    """
    rank = Rank(max_pulls=8)
    for n, num_bytes, timeout_s in ((1, 40, 1e9), (2, 40, 0.0), (3, 10, 0.0), (4, 10, 1e9)):
        waiting = replace(load(n), timeout_s=timeout_s)
        rank.incoming.pull(
            replace(waiting, ticket=replace(waiting.ticket, kv_bytes=num_bytes << 20))
        )
    assert list(rank.agent.pulls) == ["t1"]
    assert rank.incoming.take_results() == (set(), {"k2", "k3"})
    assert list(rank.agent.pulls) == ["t1", "t4"]
    heard = [message for message in rank.heard() if not isinstance(message, PullFailed)]
    freed = [RankLandingFreed(0, 2), RankLandingFreed(0, 3)]
    assert heard == [Pulling(0, 1), *freed, Pulling(0, 4)]
    for ticket_id in ("t1", "t4"):
        rank.agent.pulls[ticket_id].set_result(ALL_CAME)
    assert rank.incoming.take_results() == ({"k1", "k4"}, set())


@pytest.mark.fault("F23")
def test_the_deadline_of_a_pull_counts_from_its_start_and_a_silent_pull_lets_the_next_begin() -> (
    None
):
    rank = Rank(max_pulls=1)
    for n in (1, 2, 3):
        rank.incoming.pull(replace(load(n), timeout_s=4.5))
    assert list(rank.agent.pulls) == ["t1"]
    assert rank.agent.options["t1"]["deadline_s"] == 4.5
    rank.agent.options["t1"]["on_silent"]()
    assert list(rank.agent.pulls) == ["t1", "t2"]
    assert rank.agent.options["t2"]["deadline_s"] == 4.5
    rank.agent.pulls["t1"].set_result(ALL_CAME)
    assert list(rank.agent.pulls) == ["t1", "t2"], "only silent pulls run beside another"
    rank.agent.pulls["t2"].set_result(ALL_CAME)
    rank.agent.pulls["t3"].set_result(ALL_CAME)
    assert rank.incoming.take_results() == ({"k1", "k2", "k3"}, set())


@pytest.mark.fault("F8", "F23")
def test_the_outcome_of_a_pull_is_reported_at_once_and_not_with_the_next_step() -> None:
    """A step may take longer than a pull and its grace period. In this test, vLLM does not ask for
    results.
    """
    rank = Rank(max_pulls=1)
    for n in (1, 2, 3):
        rank.incoming.pull(load(n))
    rank.agent.pulls["t1"].set_result(ALL_CAME)
    arrived = [Arrived(0, 1), RankLandingFreed(0, 1)]
    assert rank.heard() == [Pulling(0, 1), *arrived, Pulling(0, 2)]
    rank.agent.pulls["t2"].set_exception(KvTransferFailed("x", reason=PullFailure.TIMEOUT))
    failed, pulling = rank.heard()
    assert isinstance(failed, PullFailed)
    assert (failed.leg, failed.cause) == (2, PullFailure.TIMEOUT)
    assert pulling == Pulling(0, 3)
    rank.incoming.cancel(load(3))
    assert not [m for m in rank.heard() if isinstance(m, PullFailed | Arrived)], "leg 3 was aborted"


@pytest.mark.req("S48")
@pytest.mark.parametrize("is_token_first", [False, True])
def test_an_early_load_is_complete_when_it_has_both_its_kv_and_token_1(
    is_token_first: bool,
) -> None:
    rank = Rank(max_pulls=1)
    rank.incoming.pull(load(1))
    rank.incoming.pull(load(2, is_early=True))
    assert "t2" in rank.agent.pulls, "an early load waits for prefill, not for its turn"
    if is_token_first:
        rank.incoming.join(2, 77)
    rank.agent.pulls["t2"].set_result(ALL_CAME)
    if not is_token_first:
        assert rank.incoming.take_results() == (set(), set())
        rank.incoming.join(2, 77)
    assert rank.incoming.take_results() == ({"k2"}, set())
    assert rank.incoming.take_first_tokens() == {2: 77}
    assert rank.incoming.take_first_tokens() == {}


def test_a_load_cancelled_just_after_it_arrived_is_not_passed_to_the_computation() -> None:
    """vLLM asks for results once per step. A request may end after its load arrived and before that
    step.
    """
    rank = Rank()
    rank.incoming.pull(load(1))
    rank.agent.pulls["t1"].set_result(ALL_CAME)
    rank.incoming.cancel(load(1))
    assert rank.incoming.take_results() == (set(), {"k1"})
    rank.incoming.entered(Entered(1, 0))
    received = rank.heard()[-1]
    assert isinstance(received, Received)
    assert received.kv_bytes == 0, "the result of the first pull is forgotten"


def test_an_early_load_cancelled_while_it_waits_for_token_1_gives_its_blocks_back() -> None:
    rank = Rank()
    rank.incoming.pull(load(2, is_early=True))
    rank.agent.pulls["t2"].set_result(ALL_CAME)
    assert rank.incoming.take_results() == (set(), set())
    rank.incoming.cancel(load(2, is_early=True))
    assert rank.incoming.take_results() == (set(), {"k2"})


STORE = Store("t1", 0, ArenaRange(64, 9 * WIDTH), 5.0, 9, is_per_layer=True)
ORDER = Open("t1", 0, 64, 9 * WIDTH, 9, 5.0)


@pytest.mark.req("S48")
def test_layers_are_gathered_as_they_are_computed_and_ready_with_the_last_chunk() -> None:
    rank = Rank()
    rank.outgoing.open(ORDER)
    assert rank.heard() == [RankTicketOpened(0, "t1")]
    first = StorePart(STORE, 0, 2, ((4, 5),), is_last=False)
    last = StorePart(STORE, 2, 3, ((4, 5, 7),), is_last=True)
    for layer in range(NUM_LAYERS):
        rank.outgoing.put_layer([first], layer)
    rank.outgoing.end_step([first])
    assert rank.agent.said == [("open", "t1")]
    rank.outgoing.put_layer([last], 0)
    assert rank.agent.said[1:] == [("ready", "t1", 1)]
    rank.outgoing.end_step([last])
    assert rank.agent.said[2:] == [("ready", "t1", 2), ("ready", "t1", 3)], "no layer is left out"
    staged = rank.agent.staging(STORE.staging).reshape(-1, WIDTH)[:, 0]
    assert staged.tolist() == [4, 5, 7, 14, 15, 17, 24, 25, 27]


@pytest.mark.req("S48")
def test_a_layer_with_a_state_has_no_hook_and_is_gathered_with_the_next_layer_that_has() -> None:
    """Layer 0 keeps a state, which is in the block of the last token. Layers 1 and 2 have hooks."""
    rank = Rank(groups=CacheGroups(4, (STATE_WINDOW, 0)), group_of=(0, 1, 1))
    rank.outgoing.open(ORDER)
    first = StorePart(STORE, 0, 2, ((), (4, 5)), is_last=False)
    last = StorePart(STORE, 2, 3, ((6,), (4, 5, 7)), is_last=True)
    for layer in (1, 2):
        rank.outgoing.put_layer([first], layer)
    rank.outgoing.end_step([first])
    rank.outgoing.put_layer([last], 1)
    assert rank.agent.said[1:] == [("ready", "t1", 1), ("ready", "t1", 2)]
    rank.outgoing.put_layer([last], 2)
    rank.outgoing.end_step([last])
    assert rank.agent.said[3:] == [("ready", "t1", 3)]
    staged = rank.agent.staging(STORE.staging).reshape(-1, WIDTH)[:, 0]
    assert staged[:7].tolist() == [6, 14, 15, 17, 24, 25, 27]


def windowed() -> Rank:
    """A rank whose layer 1 has a window of 4 tokens. The other layers need all tokens."""
    return Rank(groups=CacheGroups(4, (0, 4)), group_of=(0, 1, 0))


def test_of_a_layer_with_a_window_only_the_window_is_gathered() -> None:
    """After 9 tokens, the next one sees tokens 6 to 8 in layer 1. They are in blocks 1 and 2."""
    rank = windowed()
    rank.outgoing.open(ORDER)
    first = StorePart(STORE, 0, 1, ((4,), ()), is_last=False)
    last = StorePart(STORE, 1, 3, ((4, 5, 7), (2, 3)), is_last=True)
    for part in (first, last):
        for layer in range(NUM_LAYERS):
            rank.outgoing.put_layer([part], layer)
        rank.outgoing.end_step([part])
    assert rank.agent.said[1:] == [("ready", "t1", n) for n in (1, 2, 3)]
    staged = rank.agent.staging(STORE.staging).reshape(-1, WIDTH)[:, 0]
    assert staged.tolist() == [4, 5, 7, 12, 13, 24, 25, 27, 0]
    whole = windowed()
    whole.outgoing.stage([replace(STORE, block_ids=last.block_ids)])
    assert whole.agent.said == [("stage", "t1")]
    assert (whole.agent.arena == rank.agent.arena).all(), "as when it is gathered per layer"


def test_what_lands_goes_into_the_blocks_of_each_layers_group() -> None:
    rank = windowed()
    rank.incoming.pull(replace(load(1), num_tokens=9, block_ids=((4, 5, 7), (2, 3))))
    rank.agent.on_range["t1"](2 * WIDTH, np.zeros(4 * WIDTH, np.uint8))
    assert rank.caches.scattered == [
        (0, 2 * WIDTH, WIDTH, (4, 5, 7)),
        (1, 0, 2 * WIDTH, (2, 3)),
        (2, 0, WIDTH, (4, 5, 7)),
    ]
    rank.agent.pulls["t1"].set_result(PullResult(8 * WIDTH, 0.0))
    assert rank.incoming.take_results() == ({"k1"}, set())


def test_a_step_may_come_before_the_hosts_order_and_opens_the_ticket_itself() -> None:
    rank = Rank()
    rank.outgoing.put_layer([StorePart(STORE, 0, 3, ((4, 5, 7),), is_last=True)], 0)
    rank.outgoing.open(ORDER)
    assert rank.agent.said == [("open", "t1"), ("ready", "t1", 1)]


@pytest.mark.fault("F27")
def test_nothing_is_written_for_a_ticket_that_was_closed() -> None:
    rank = Rank()
    rank.outgoing.open(ORDER)
    rank.outgoing.release("t1")
    rank.outgoing.closed("t1", "released")
    rank.agent.said.clear()
    rank.outgoing.put_layer([StorePart(STORE, 0, 3, ((4, 5, 7),), is_last=True)], 0)
    rank.outgoing.drop("t1")
    assert rank.agent.said == []
    assert rank.agent.arena.sum() == 0
    assert rank.heard() == [RankTicketOpened(0, "t1"), RankTicketClosed(0, "t1", "released")]


def test_a_ticket_released_before_its_prompt_is_staged_is_ended_in_its_step() -> None:
    rank = Rank()
    store = Store("t1", 0, ArenaRange(0, 9 * WIDTH), 5.0, 9, block_ids=((1, 2, 3),))
    rank.outgoing.release("t1")
    rank.outgoing.stage([store])
    assert rank.heard() == [RankTicketClosed(0, "t1", "released")]
    assert rank.agent.said == []


def test_kv_that_lands_after_a_cancel_is_not_scattered_into_freed_blocks() -> None:
    """The agent's thread learns late of the cancellation. vLLM already considers the blocks
    free.
    """
    rank = Rank()
    rank.incoming.pull(load(1))
    rank.incoming.cancel(load(1))
    assert rank.incoming.take_results() == (set(), {"k1"})
    rank.agent.on_range["t1"](0, np.zeros(16, np.uint8))
    assert rank.caches.scattered == []


def test_a_cancelled_load_keeps_its_blocks_until_the_range_under_way_is_scattered() -> None:
    rank = Rank()
    rank.incoming.pull(load(1))
    entered, may_leave = threading.Event(), threading.Event()

    def scatter_part(*_: object) -> None:
        entered.set()
        assert may_leave.wait(60)

    rank.caches.scatter_part = scatter_part  # type: ignore[method-assign,assignment]
    landing = threading.Thread(target=rank.agent.on_range["t1"], args=(0, np.zeros(16, np.uint8)))
    landing.start()
    assert entered.wait(60)
    rank.incoming.cancel(load(1))  # in the thread of the step, which does not wait for the copy
    assert rank.incoming.take_results() == (set(), set())
    may_leave.set()
    landing.join(60)
    assert rank.incoming.take_results() == (set(), {"k1"})


@pytest.mark.fault("F27")
def test_ranges_that_land_while_loads_are_cancelled_never_reach_released_blocks() -> None:
    """The agent's thread still delivers ranges when a load is cancelled, which may happen at any
    point of a copy.
    """
    rank, num_loads = Rank(max_pulls=30), 30
    begun = [threading.Event() for _ in range(num_loads)]
    released: set[int] = set()
    misplaced: list[int] = []

    def scatter_part(data: Any, offset: int, block_ids: Any, heads: Any) -> None:
        misplaced.extend(released.intersection(block_ids))
        begun[block_ids[0]].set()
        misplaced.extend(released.intersection(block_ids))

    rank.caches.scatter_part = scatter_part  # type: ignore[method-assign]
    for n in range(num_loads):
        rank.incoming.pull(load(n, block_ids=(n,)))
    data = np.zeros(16, np.uint8)

    def deliver() -> None:
        for n in range(num_loads):
            while n not in released:
                rank.agent.on_range[f"t{n}"](0, data)
            rank.agent.on_range[f"t{n}"](0, data)

    agent = threading.Thread(target=deliver)
    agent.start()
    for n in range(num_loads):
        assert begun[n].wait(60)
        rank.incoming.cancel(load(n, block_ids=(n,)))
        while n not in released:  # a running copy keeps the blocks from being released
            received, failed = rank.incoming.take_results()
            assert not received
            released.update(int(key[1:]) for key in failed)
    agent.join(60)
    assert misplaced == []
