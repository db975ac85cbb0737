from __future__ import annotations

import os
import time

from pdmesh.services.gateway.parsing.cpu_time import cpu_seconds


def test_the_cpu_time_of_a_process_is_known_and_is_zero_if_there_is_no_such_process() -> None:
    before = cpu_seconds(os.getpid())
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert cpu_seconds(os.getpid()) > before
    assert cpu_seconds(2**22 + 1) == 0.0
