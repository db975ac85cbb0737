"""Runs `pdmesh up`, `status` and `down` on a real mesh of simulated engines. Processes are killed
at any moment, and none may be left behind.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from pdmesh.launcher import state
from tests.support.sites.command import START_S, Pdmesh, pdmesh
from tests.support.sites.processes import is_alive
from tests.support.waiting import wait_until

__all__ = ["pdmesh"]


def pids(mesh: state.MeshState) -> dict[str, int]:
    return {name: process.pid for name, process in mesh.processes.items()}


def open_to_others(state_dir: Path) -> list[str]:
    """The files of the state directory that another user may read or list."""
    found = [state_dir, *state_dir.rglob("*")]
    return [str(path) for path in found if path.lstat().st_mode & 0o077 and not path.is_symlink()]


def lives_again(pdmesh: Pdmesh, name: str, killed: int) -> bool:
    return pids(pdmesh.mesh())[name] not in (0, killed)


@pytest.mark.req("S126")
def test_status_names_a_prefill_and_a_decode_that_exchange_no_kv(pdmesh: Pdmesh) -> None:
    """The decode's model has another seed, as after a hasty change of one role's settings. The mesh
    still serves requests.
    """
    pdmesh.environment["PDMESH_DECODE_SIM_SEED"] = "2"
    pdmesh.until_ready(pdmesh.up())
    assert pdmesh.chat().strip()
    line = "group default: prefill-0 and decode-0 exchange no KV: prefill-0 runs another "
    wait_until(lambda: line in pdmesh.run("status").stdout)
    (warning,) = json.loads(pdmesh.run("status", "--json").stdout)["warnings"]
    assert warning.startswith(line)


@pytest.mark.req("S74")
def test_a_mesh_comes_up_answers_heals_and_goes_down(pdmesh: Pdmesh) -> None:
    launcher = pdmesh.up()
    mesh = pdmesh.until_ready(launcher)
    before = pids(mesh)
    assert all(is_alive(pid) for pid in before.values())

    assert pdmesh.chat().strip()

    status = pdmesh.run("status", "--json")
    shown = json.loads(status.stdout)
    assert shown["warnings"] == []
    rows = {row["id"]: row for row in shown["rows"]}
    assert {"prefill-0", "decode-0", "gateway-0", "master-scheduler"} <= rows.keys()
    assert (rows["prefill-0"]["role"], rows["decode-0"]["role"]) == ("prefill", "decode")
    assert rows["decode-0"]["slots_used"] == 0
    # On a busy machine, a lease may end between two calls of `status`. The instance is back soon.
    wait_until(lambda: "prefill-0" in pdmesh.run("status").stdout)

    same = ("--prefill", "1", "--decode", "1", "--http-port", "0", "--grpc-port", "0")
    again = pdmesh.run("up", "--engine", "sim", *same)
    assert again.returncode == 0
    assert "already up" in again.stdout
    other = pdmesh.run("up", "--engine", "sim", *same, "--gateways", "2", "--blank", "1")
    assert (other.returncode, other.stdout) == (1, "")
    assert "with other options: --blank 0, not 1; --gateways 1, not 2; stop it" in other.stderr
    assert open_to_others(pdmesh.directory / "state") == []

    os.kill(before["decode-0"], signal.SIGKILL)
    wait_until(lambda: pids(pdmesh.mesh())["decode-0"] not in (0, before["decode-0"]))
    after = pids(pdmesh.mesh())
    assert {n for n in before if before[n] != after[n]} == {"decode-0"}

    os.kill(launcher.pid, signal.SIGINT)
    assert launcher.wait(30) == 0
    wait_until(lambda: not any(is_alive(pid) for pid in after.values()))
    said = pdmesh.output.read_text()
    assert re.search(r"the mesh is ready after \d", said)
    assert "chat/completions" in said
    assert said.rstrip().endswith("pdmesh: stopped")
    assert not [*(pdmesh.directory / "state" / "run").iterdir()], "the files of the run are removed"


@pytest.mark.req("S74")
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_the_whole_mesh_ends_when_its_launcher_is_killed(pdmesh: Pdmesh) -> None:
    launcher = pdmesh.up()
    mesh = pdmesh.until_ready(launcher)
    # A stopped process runs no signal handler. It must end all the same.
    os.kill(pids(mesh)["prefill-0"], signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids(mesh).values()))
    left = pdmesh.directory / "state"
    assert pdmesh.run("status").stderr == (
        f"pdmesh: no mesh is running here; start one with: pdmesh up --state-dir {left}\n"
    )
    # A node agent that died with the mesh leaves this file.
    (left / "run" / "node-status.json").write_text("{}")
    down = pdmesh.run("down")
    assert (down.returncode, down.stdout) == (
        0,
        "no mesh is running here; the files of the last one are removed\n",
    )
    assert not [*(left / "run").iterdir(), *left.glob("mesh.json")]
    assert pdmesh.run("down").stdout == "no mesh is running here\n"


@pytest.mark.req("S74")
def test_a_launcher_without_a_reader_keeps_its_mesh_running(pdmesh: Pdmesh) -> None:
    """After `pdmesh up | head`, or when somebody has closed the terminal, the launcher cannot print
    any more. It must still start a killed decode again.
    """
    launcher = pdmesh.up(stdout=subprocess.PIPE)
    mesh = pdmesh.until_ready(launcher)
    assert launcher.stdout is not None
    launcher.stdout.close()
    before = pids(mesh)
    for _ in range(2):  # the launcher prints more about the second death than about the first
        killed = pids(pdmesh.mesh())["decode-0"]
        os.kill(killed, signal.SIGKILL)
        wait_until(partial(lives_again, pdmesh, "decode-0", killed))
    assert pdmesh.chat()
    assert {n for n, pid in pids(pdmesh.mesh()).items() if before[n] != pid} == {"decode-0"}
    said = (pdmesh.directory / "state" / "logs" / "launcher.log").read_text()
    assert "decode-0 was killed by signal 9 (1 in a row); restarting it now" in said
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait(60) == 0
    assert state.locker_pid(pdmesh.directory / "state") is None


def test_a_detached_mesh_returns_when_it_is_ready_and_down_stops_it(pdmesh: Pdmesh) -> None:
    up = pdmesh.run(
        "up", "--engine", "sim", "--fusion", "--http-port", "0", "--grpc-port", "0", "--detach"
    )
    assert up.returncode == 0, up.stderr
    assert "the mesh is ready" in up.stdout
    mesh = pdmesh.mesh()
    assert "fusion-0" in mesh.processes
    assert pdmesh.chat()
    down = pdmesh.run("down")
    assert (down.returncode, down.stdout.startswith("the mesh is down")) == (0, True)
    assert not any(is_alive(pid) for pid in pids(mesh).values())


def test_a_taken_port_is_reported_in_one_line_and_nothing_is_left_behind(pdmesh: Pdmesh) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        up = pdmesh.run("up", "--engine", "sim", "--http-port", port, "--grpc-port", "0")
    assert up.returncode == 1
    lines = up.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"pdmesh: port {port} on 127.0.0.1 is taken by ")
    assert lines[0].endswith("choose another with --http-port")
    assert state.locker_pid(pdmesh.directory / "state") is None


def test_a_service_that_cannot_start_ends_the_start_with_its_reason(pdmesh: Pdmesh) -> None:
    pdmesh.environment["PDMESH_LEASE_S"] = "never"
    launcher = pdmesh.up()
    assert launcher.wait(START_S) == 1
    last = pdmesh.output.read_text().strip().splitlines()[-1]
    assert "does not start" in last
    assert "PDMESH_LEASE_S" in last
    assert state.locker_pid(pdmesh.directory / "state") is None


def test_an_engine_that_can_never_start_is_tried_once_and_ends_the_start_in_one_line(
    pdmesh: Pdmesh,
) -> None:
    """vLLM ends in the same way for an --engine-arg that only vLLM itself can check."""
    launcher = pdmesh.up("--encoder", "1")  # by default, the simulated model takes no images
    assert launcher.wait(START_S) == 1
    lines = pdmesh.output.read_text().strip().splitlines()
    assert not [line for line in lines if "restarting" in line or "given up" in line]
    assert [line for line in lines if "takes no images: set SIM_IMAGE_TOKENS" in line] == lines[-1:]
    assert "encoder-0 does not start" in lines[-1]
    assert state.locker_pid(pdmesh.directory / "state") is None


def test_a_start_that_is_interrupted_leaves_nothing_behind(pdmesh: Pdmesh) -> None:
    launcher = pdmesh.up()
    wait_until(lambda: "nats is ready" in pdmesh.output.read_text(), START_S)
    children = pids(pdmesh.mesh())
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait(30) == 130
    wait_until(lambda: not any(is_alive(pid) for pid in children.values() if pid))
