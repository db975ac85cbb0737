"""The launcher's files: its state, its hash secret, and the logs of its processes."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdmesh.launcher import log_files, state
from pdmesh.launcher import mesh as mesh_module
from pdmesh.launcher.spec import MeshSpec
from tests.support.waiting import until


def test_a_state_directory_is_locked_by_one_mesh_at_a_time(tmp_path: Path) -> None:
    with state.lock(tmp_path):
        assert state.is_locked(tmp_path)
        with pytest.raises(state.MeshRunning, match="already running"):
            state.lock(tmp_path)
    assert state.locker_pid(tmp_path) is None


def test_the_state_of_a_dead_launcher_does_not_count(tmp_path: Path) -> None:
    mesh = state.MeshState(
        1, "ready", "sim", "sim", "http://x", "x:1", "nats://x", "unix:///x",
        processes={"nats": state.ProcessState(2, "nats", "running")},
    )  # fmt: skip
    with state.lock(tmp_path):
        state.write(tmp_path, mesh)
        assert state.read(tmp_path) == mesh
    assert state.read(tmp_path) is None


def test_a_new_state_directory_is_private_and_an_existing_one_is_not_changed(
    tmp_path: Path,
) -> None:
    def mode_after_lock(directory: Path) -> int:
        with state.lock(directory):
            return directory.stat().st_mode & 0o777

    assert mode_after_lock(tmp_path / "new" / "one") == 0o700
    (of_before := tmp_path / "before").mkdir(mode=0o755)
    (of_before / "lock").touch()
    assert mode_after_lock(of_before) == 0o700
    (project := tmp_path / "project").mkdir(mode=0o755)
    (project / "README.md").touch()
    assert mode_after_lock(project) == 0o755


def test_a_launcher_without_a_recorded_pid_is_not_taken_for_its_predecessor(
    tmp_path: Path,
) -> None:
    """Otherwise `down` would send a signal to a process that is gone, or to another process with
    the same id.
    """
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with state.lock(tmp_path) as file:
        assert state.locker_pid(tmp_path) == os.getpid()
        file.seek(0)
        file.truncate()
        file.write(str(gone.pid))
        file.flush()
        assert state.is_locked(tmp_path)
        assert state.locker_pid(tmp_path) is None


def test_the_hash_secret_is_made_once_and_is_private(tmp_path: Path) -> None:
    secret = state.hash_secret(tmp_path, {})
    assert len(bytes.fromhex(secret)) == 32
    assert state.hash_secret(tmp_path, {}) == secret
    assert (tmp_path / "hash-secret").stat().st_mode & 0o777 == 0o600


def test_a_hash_secret_from_the_environment_is_used_and_not_written(tmp_path: Path) -> None:
    """Meshes that share a store must name blocks with the same key."""
    assert state.hash_secret(tmp_path, {"PDMESH_HASH_SECRET": "shared by two"}) == "shared by two"
    assert not (tmp_path / "hash-secret").exists()
    assert state.hash_secret(tmp_path, {"PDMESH_HASH_SECRET": ""}) != ""


def test_a_log_over_its_bound_is_set_aside_and_continues_empty(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        log_files.bound([log, tmp_path / "missing.log"], max_bytes=99)
        writer.write(b"after\n")
    assert (tmp_path / "a.log.1").read_bytes() == b"x" * 100
    assert log.read_bytes() == b"after\n"
    assert log_files.last_lines(log) == ["after"]


def test_on_a_full_disk_a_log_over_its_bound_is_still_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 100)
    log_files.bound([log], max_bytes=99)
    assert [(p.name, p.stat().st_size) for p in tmp_path.iterdir()] == [("a.log", 0)]


async def test_a_failing_chore_of_the_launcher_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    said: list[str] = []

    class Health:
        async def kill_silent(self) -> None:
            done.append("kill_silent")
            raise OSError("no descriptors left")

        async def note_ready(self) -> None:
            done.append("note_ready")

    def say(line: str) -> None:
        said.append(line)
        raise BrokenPipeError

    monkeypatch.setattr(mesh_module, "_HOUSEKEEPING_S", 0.0)
    mesh = mesh_module.Mesh(MeshSpec(engine="sim"), tmp_path, report=say)
    mesh._health = Health()  # type: ignore[assignment]
    monkeypatch.setattr(mesh, "_bound_logs", lambda: _fail())
    monkeypatch.setattr(mesh, "_write_state", lambda: done.append("write_state"))
    keeping = asyncio.create_task(mesh._keep_house())
    await until(lambda: done.count("write_state") >= 2)
    keeping.cancel()
    assert done[:6] == ["kill_silent", "note_ready", "write_state"] * 2
    assert said == [
        "housekeeping failed: OSError('disk')",
        "housekeeping failed: OSError('no descriptors left')",
    ]


async def _fail() -> None:
    raise OSError("disk")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "it logged nothing"),
        ("Killed", "Killed"),
        ('{"event": "service.failed", "reason": "no model"}', "no model"),
        ('{"event": "service.stopped"}', "service.stopped"),
        ('{"event": "service.crashed", "exception": "Traceback:\\n  x\\nOSError: full"}',
            "OSError: full"),
    ],
)  # fmt: skip
def test_the_last_line_of_a_log_tells_why_its_process_died(
    tmp_path: Path, line: str, reason: str
) -> None:
    log = tmp_path / "a.log"
    log.write_text(f'{{"event": "service.started"}}\n{line}\n' if line else "")
    assert log_files.last_word(log) == f"{reason} (log: {log})"
