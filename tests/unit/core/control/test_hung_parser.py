from __future__ import annotations

from pdmesh.core.control.hung_parser import HungParser


def test_a_process_that_gets_little_cpu_on_a_busy_machine_is_given_time() -> None:
    parser = HungParser()
    parser.begin(100.0, 7.0)
    for second in range(1, 300):
        assert not parser.is_hung(30.0, 100.0 + second, 7.0 + 0.05 * second)


def test_the_time_of_a_process_that_does_nothing_is_hung_after_its_limit() -> None:
    parser = HungParser()
    parser.begin(100.0, 7.0)
    assert not parser.is_hung(30.0, 110.0, 9.0)
    assert not parser.is_hung(30.0, 139.0, 9.01)
    assert parser.is_hung(30.0, 140.0, 9.01)


def test_the_time_of_a_process_that_computes_is_hung_after_its_limit_of_work() -> None:
    parser = HungParser()
    parser.begin(100.0, 7.0)
    assert not parser.is_hung(30.0, 129.0, 36.0)
    assert parser.is_hung(30.0, 131.0, 37.0)


def test_no_request_takes_for_ever_on_a_little_work_now_and_then() -> None:
    parser = HungParser()
    parser.begin(0.0, 0.0)
    spent = [parser.is_hung(30.0, float(now), now * 0.02) for now in range(0, 601, 10)]
    assert spent.index(True) == 60


def test_each_request_has_a_limit_of_its_own() -> None:
    parser = HungParser()
    parser.begin(0.0, 0.0)
    assert parser.is_hung(30.0, 31.0, 31.0)
    parser.begin(31.0, 31.0)
    assert not parser.is_hung(30.0, 32.0, 32.0)
