"""The work of one placement decision, counted in bytecodes, does not grow with the mesh (S94)."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.placement.plan import build
from loadtests.placement.scale.decisions import Decider
from pdmesh.core.kv.transfer.source_exclusions import (
    ExcludedSource,
    Fit,
    KvExchange,
    KvSource,
    SourceFault,
)
from pdmesh.core.model import Role
from pdmesh.core.placement.fleet import InstanceRecorded
from pdmesh.core.placement.local_ranking import LocalInstance, LocalQuery, LocalRanking
from pdmesh.core.placement.plan import Plan
from pdmesh.core.placement.policies import Query

pytestmark = pytest.mark.req("S94")


class Bytecodes:
    """Counts the bytecodes that Python executes inside of the `with` block."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self._trace


def test_a_decision_executes_as_much_in_a_large_mesh_as_in_a_small_one() -> None:
    counts = {}
    for size in (800, 2000):
        decider = Decider(*build(size))
        decider.run(20)  # the work that is done once per set of instances is not counted
        with Bytecodes() as executed:
            decider.run(20)
        counts[size] = executed.count
    assert counts[800] > 20 * 96  # each decision scores 96 prefills
    assert counts[2000] == pytest.approx(counts[800], rel=0.03)


def test_a_decision_scores_exactly_as_many_however_often_an_instance_is_drawn() -> None:
    scored = {size: Decider(*build(size)).mean_scored() for size in (800, 2000)}
    assert scored[2000] == pytest.approx(scored[800], rel=0.01)


@pytest.mark.fault("F24")
def test_a_pair_that_exchanges_no_kv_makes_no_other_decision_dearer() -> None:
    """One decode avoids one of 240 prefills. For that reason alone, no decision may look at all
    pairs.
    """
    decider, counts = Decider(*build(400, 0.6)), list[int]()
    fleet = decider.placement.fleet
    identity = fleet.instances["decode-0"].identity
    avoided = ExcludedSource(KvSource("prefill-3", 1), SourceFault.UNREACHABLE)
    for sources in ((), (avoided,)):
        fleet.handle(InstanceRecorded(replace(identity, excluded_sources=sources)), 0.0)
        decider.run(5)
        with Bytecodes() as executed:
            decider.run(20)
        counts.append(executed.count)
    assert counts[1] <= 1.2 * counts[0]


_PREFILLS, _DECODES = [f"prefill-{i}" for i in range(4)], [f"decode-{i}" for i in range(4)]
_REPORTS = st.dictionaries(
    st.sampled_from(_DECODES),
    st.lists(
        st.tuples(
            st.sampled_from(_PREFILLS),
            st.sampled_from([SourceFault.CORRUPT, SourceFault.UNREACHABLE]),
        ),
        max_size=5,
    ),
)


@pytest.mark.fault("F24")
@given(_REPORTS)
def test_candidates_are_those_that_a_look_at_all_pairs_finds(
    reports: dict[str, list[tuple[str, SourceFault]]],
) -> None:
    excluded = {
        decode: [ExcludedSource(KvSource(name, 1), fault) for name, fault in each]
        for decode, each in reports.items()
    }
    exchange = KvExchange.of(excluded, dict.fromkeys((*_PREFILLS, *_DECODES), 1))
    placement, _ = build(8)
    for name, each in excluded.items():
        identity = replace(placement.fleet.instances[name].identity, excluded_sources=tuple(each))
        placement.fleet.handle(InstanceRecorded(identity), 0.0)
    plan = placement.plan(Query(num_prompt_tokens=64), {}, 0.0)
    assert isinstance(plan, Plan)
    fits = {(d, p): exchange.fit(d, p) for d in _DECODES for p in _PREFILLS}
    if Fit.GOOD not in fits.values():
        assert not plan.decodes  # one instance does both phases
        return
    may = {p for d, p in fits if fits[d, p] is not Fit.EJECTED}
    assert {c.instance_id for c in plan.prefills} == may
    best = [min(fits[d, c.instance_id] for d in _DECODES) for c in plan.prefills]
    assert best == sorted(best)
    first = plan.prefills[0].instance_id
    decodes = [c.instance_id for c in plan.decodes]
    able = {d for d in _DECODES if any(fits[d, p] is not Fit.EJECTED for p in _PREFILLS)}
    assert set(decodes) == able
    assert [fits[d, first] for d in decodes] == sorted(fits[d, first] for d in decodes)


def local(role: Role, number: int, **more: Any) -> LocalInstance:
    group = more.pop("group_id", "g0")
    return LocalInstance(f"{role.value}-{number}", 1, role, "m", "", group, group, "", **more)


@pytest.mark.req("S42")
def test_a_gateway_without_a_master_looks_at_as_many_instances_in_a_large_mesh() -> None:
    counts = {}
    for size in (800, 8000):
        ranking, asked = LocalRanking("", "gateway-0"), list[str]()
        ranking.see(local(r, i) for r in (Role.PREFILL, Role.DECODE) for i in range(size // 2))

        def num_open(name: str, incarnation: int, asked: list[str] = asked) -> int:
            asked.append(name)
            return 0

        with Bytecodes() as executed:
            ranking.rank(LocalQuery("m"), num_open)
        counts[size] = executed.count, len(asked)
    assert counts[8000][1] == counts[800][1]
    assert counts[8000][0] <= 1.05 * counts[800][0]
