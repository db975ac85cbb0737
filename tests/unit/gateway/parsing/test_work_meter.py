from __future__ import annotations

import os
import time

from pdmesh.services.gateway.parsing.work_meter import WorkMeter, cpu_seconds


def test_a_process_that_gets_little_cpu_on_a_busy_machine_is_given_time() -> None:
    meter = WorkMeter()
    meter.begin(100.0, 7.0)
    for second in range(1, 300):
        assert not meter.is_spent(30.0, 100.0 + second, 7.0 + 0.05 * second)


def test_the_time_of_a_process_that_does_nothing_is_spent_after_its_limit() -> None:
    meter = WorkMeter()
    meter.begin(100.0, 7.0)
    assert not meter.is_spent(30.0, 110.0, 9.0)
    assert not meter.is_spent(30.0, 139.0, 9.01)
    assert meter.is_spent(30.0, 140.0, 9.01)


def test_the_time_of_a_process_that_computes_is_spent_after_its_limit_of_work() -> None:
    meter = WorkMeter()
    meter.begin(100.0, 7.0)
    assert not meter.is_spent(30.0, 129.0, 36.0)
    assert meter.is_spent(30.0, 131.0, 37.0)


def test_no_request_takes_for_ever_on_a_little_work_now_and_then() -> None:
    meter = WorkMeter()
    meter.begin(0.0, 0.0)
    spent = [meter.is_spent(30.0, float(now), now * 0.02) for now in range(0, 601, 10)]
    assert spent.index(True) == 60


def test_each_request_has_a_limit_of_its_own() -> None:
    meter = WorkMeter()
    meter.begin(0.0, 0.0)
    assert meter.is_spent(30.0, 31.0, 31.0)
    meter.begin(31.0, 31.0)
    assert not meter.is_spent(30.0, 32.0, 32.0)


def test_the_cpu_time_of_a_process_is_known_and_is_zero_if_there_is_no_such_process() -> None:
    before = cpu_seconds(os.getpid())
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert cpu_seconds(os.getpid()) > before
    assert cpu_seconds(2**22 + 1) == 0.0
