"""What a decision computes, counted: it must not grow with the mesh (S94)."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Self

import pytest

from loadtests.placement.plan import build
from loadtests.placement.scale.decisions import Decider
from pdmesh.core.model import Role
from pdmesh.core.placement.local_ranking import LocalInstance, LocalQuery, LocalRanking

pytestmark = pytest.mark.req("S94")


class Bytecodes:
    """Counts every bytecode that Python executes while it is entered."""

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
    for size in (800, 4000):
        decider = Decider(*build(size))
        decider.run(20)  # what is made once, for the set of instances, is not counted
        with Bytecodes() as executed:
            decider.run(20)
        counts[size] = executed.count
    assert counts[800] > 20 * 96  # it scores 96 prefills
    assert counts[4000] == pytest.approx(counts[800], rel=0.03)


def test_a_decision_scores_exactly_as_many_however_often_an_instance_is_drawn() -> None:
    scored = {size: Decider(*build(size)).mean_scored() for size in (800, 4000)}
    assert scored[4000] == pytest.approx(scored[800], rel=0.01)


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
