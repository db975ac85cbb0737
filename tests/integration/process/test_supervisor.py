"""Tests the supervisor with real processes. It must restart a process that has died, and must not
restart a process that it has stopped.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pdmesh.core.control.restart_policy import (
    GiveUp,
    ProcessPhase,
    RestartPolicy,
    RestartScheduled,
)
from pdmesh.embedded import child
from pdmesh.launcher.spec import ProcessSpec, StopOrder
from pdmesh.launcher.supervisor import Notice, Supervisor
from tests.support.sites.processes import is_alive
from tests.support.waiting import until

OBEDIENT = (
    "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print('up', "
    "flush=True)\nwhile True: signal.pause()"
)
STUBBORN = (
    "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\nwhile True: "
    "signal.pause()"
)


def program(name: str, source: str) -> ProcessSpec:
    return ProcessSpec(
        name, name, StopOrder.SERVER, (sys.executable, "-c", source), env=dict(os.environ)
    )


class Supervised:
    def __init__(self, directory: Path, policy: RestartPolicy | None = None) -> None:
        self.notices: list[Notice] = []
        self.supervisor = Supervisor(directory / "logs", self.notices.append, policy)

    async def until_up(self, name: str, times: int = 1) -> int:
        """Wait until the program has printed `up` `times` times, and return its pid."""
        await self.until(lambda: self.supervisor.log_file(name).read_text().count("up") >= times)
        pid = self.supervisor.pid(name)
        assert pid is not None
        return pid

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Supervised]:
    supervised = Supervised(tmp_path)
    yield supervised
    supervised.supervisor.kill_all()
    for name in list(supervised.supervisor.specs):
        await supervised.supervisor.stop(name)


async def test_a_failing_report_does_not_prevent_a_restart(tmp_path: Path) -> None:
    """Once, this happened when the launcher's terminal was gone. A killed decode stayed dead, and
    the attempt to stop it raised a KeyError.
    """
    problems: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))

    def tell(_: Notice) -> None:
        raise BrokenPipeError

    supervised = Supervised(tmp_path)
    supervisor = Supervisor(tmp_path / "logs", tell)
    supervised.supervisor = supervisor
    supervisor.start(program("a", OBEDIENT))
    first = await supervised.until_up("a")
    supervisor.signal("a", signal.SIGKILL)
    assert await supervised.until_up("a", times=2) != first
    async with asyncio.timeout(30):
        await supervisor.stop("a")
    assert supervisor.pid("a") is None
    assert [type(p["exception"]) for p in problems] == [BrokenPipeError] * len(problems)
    assert problems


async def test_a_program_that_could_not_be_started_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process_left(*_: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(child, "start", no_process_left)
    supervised = Supervised(tmp_path)
    supervised.supervisor.start(program("a", OBEDIENT))
    await supervised.supervisor.stop("a")  # the supervisor has not reported the failed start yet
    assert supervised.supervisor.phase("a") is ProcessPhase.STOPPED
    assert "cannot start: Resource temporarily unavailable" in (
        supervised.supervisor.log_file("a").read_text()
    )


@pytest.mark.req("S74")
async def test_a_killed_process_runs_again_at_once_under_another_pid(mesh: Supervised) -> None:
    mesh.supervisor.start(program("a", OBEDIENT))
    first = await mesh.until_up("a")
    mesh.supervisor.signal("a", signal.SIGKILL)
    second = await mesh.until_up("a", times=2)
    assert second != first
    assert RestartScheduled("a", code=-9, deaths=1, delay_s=0.0) in mesh.notices


async def test_a_stopped_process_ends_in_order_and_stays_down(mesh: Supervised) -> None:
    mesh.supervisor.start(program("a", OBEDIENT))
    pid = await mesh.until_up("a")
    await mesh.supervisor.stop("a")
    assert not is_alive(pid)
    assert mesh.supervisor.phase("a") is ProcessPhase.STOPPED
    assert not any(isinstance(n, RestartScheduled) for n in mesh.notices)


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace_period(
    mesh: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        __import__("pdmesh.launcher.supervisor", fromlist=["x"]).STOP_GRACE_S, StopOrder.SERVER, 0.2
    )
    mesh.supervisor.start(program("a", STUBBORN))
    pid = await mesh.until_up("a")
    async with asyncio.timeout(30):
        await mesh.supervisor.stop("a")
    assert not is_alive(pid)


async def test_a_frozen_process_can_be_stopped(mesh: Supervised) -> None:
    mesh.supervisor.start(program("a", OBEDIENT))
    await mesh.until_up("a")
    mesh.supervisor.signal("a", signal.SIGSTOP)
    async with asyncio.timeout(30):
        await mesh.supervisor.stop("a")


async def test_children_of_a_dead_process_die_before_it_is_restarted(mesh: Supervised) -> None:
    """An engine runs in processes of its own. An engine that outlived its service would keep its
    memory and its port.
    """
    source = (
        "import subprocess; print('child', subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
    )
    mesh.supervisor.start(program("a", source + OBEDIENT))
    await mesh.until_up("a")
    grandchild = int(mesh.supervisor.log_file("a").read_text().split()[1])
    assert is_alive(grandchild)
    mesh.supervisor.signal("a", signal.SIGKILL)
    await mesh.until(lambda: not is_alive(grandchild))


async def test_a_program_that_keeps_dying_is_given_up_and_its_log_says_why(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, RestartPolicy(base_delay_s=0.01, max_deaths=3))
    supervised.supervisor.start(program("a", "raise SystemExit('no such model')"))
    await supervised.until(lambda: GiveUp("a", code=1, deaths=3) in supervised.notices)
    assert supervised.supervisor.log_file("a").read_text().count("no such model") == 3


async def test_a_program_that_does_not_exist_is_a_death_like_any_other(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, RestartPolicy(max_deaths=1))
    missing = ProcessSpec("a", "a", StopOrder.SERVER, ("/nonexistent/program",), env={})
    supervised.supervisor.start(missing)
    await supervised.until(lambda: GiveUp("a", code=1, deaths=1) in supervised.notices)
    assert "cannot run /nonexistent/program" in supervised.supervisor.log_file("a").read_text()
