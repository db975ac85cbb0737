"""The state directory of a running mesh, which `pdmesh status`, `down` and `chat` read.

`mesh.json` lists the processes and their addresses. It is written atomically. The launcher holds a
lock on the file `lock` as long as it lives. So a directory never has two meshes, and a crashed
launcher leaves no lock behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from pdmesh.atomic_file import write_atomically
from pdmesh.config import read_secret
from pdmesh.errors import MeshError

_CLAIMS: Final = 5
_CLAIM_EVERY_S: Final = 0.02


class MeshRunning(Exception):
    """Another launcher has locked this state directory."""


@dataclass(frozen=True)
class ProcessState:
    pid: int
    service: str
    phase: str
    ops_address: str = ""


@dataclass(frozen=True)
class MeshState:
    """`phase` is starting, ready, stopping or failed. `message` is the cause of a failure."""

    pid: int  # the launcher's process id
    phase: str
    engine: str
    model: str
    http_url: str
    grpc_address: str
    nats_url: str
    redis_url: str
    message: str = ""
    processes: dict[str, ProcessState] = field(default_factory=dict)
    # The HTTP address of each region's gateways.
    regions: dict[str, str] = field(default_factory=dict)
    # The options with which the mesh was started.
    asked: dict[str, str] = field(default_factory=dict)
    tls_dir: str = ""  # the folder of the certificate for commands; empty: no TLS
    nats_roles: bool = False  # whether NATS identifies processes by their certificates


def mesh_file(state_dir: Path) -> Path:
    return state_dir / "mesh.json"


def write(state_dir: Path, state: MeshState) -> None:
    write_atomically(mesh_file(state_dir), json.dumps(asdict(state), indent=2) + "\n")


def read(state_dir: Path) -> MeshState | None:
    """Read the state of a mesh. Raises MeshError.

    Returns None if no launcher runs here, or if it has not written its state yet.
    """
    if not is_locked(state_dir):
        return None
    file = mesh_file(state_dir)
    try:
        data: dict[str, Any] = json.loads(file.read_text())
        processes = {name: ProcessState(**p) for name, p in data.pop("processes").items()}
        return MeshState(**data, processes=processes)
    except FileNotFoundError:
        return None
    # These errors mean that another release wrote the file.
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        down = f"pdmesh down --state-dir {shlex.quote(str(state_dir))}"
        raise MeshError(
            f"{file}: not written by this release; stop that mesh with: {down}"
        ) from exc


def lock(state_dir: Path) -> IO[str]:
    """Lock the directory until the returned file is closed. Raises `MeshRunning`."""
    make_private(state_dir)
    file = (state_dir / "lock").open("a+")
    if not _claim(file):
        file.seek(0)
        pid = file.read().strip() or "?"
        file.close()
        raise MeshRunning(f"a mesh is already running (pid {pid}, {state_dir})") from None
    file.seek(0)
    file.truncate()
    file.write(str(os.getpid()))
    file.flush()
    return file


def make_private(state_dir: Path) -> None:
    """Make the directory private, because it has keys, digests of prompts, and logs.

    The directory is not changed if it had other files before the first mesh, or is not this user's
    alone, for example /tmp.
    """
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = state_dir.stat()
    is_ours = (state_dir / "lock").exists() or not any(state_dir.iterdir())
    if is_ours and found.st_uid == os.getuid() and not found.st_mode & stat.S_ISVTX:
        state_dir.chmod(0o700)


def _claim(file: IO[str]) -> bool:
    """Try a few times, because a reader of the state may hold the lock for a moment."""
    for _ in range(_CLAIMS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(_CLAIM_EVERY_S)
        else:
            return True
    return False


def is_locked(state_dir: Path) -> bool:
    try:
        with (state_dir / "lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def locker_pid(state_dir: Path) -> int | None:
    """The pid of the launcher that has locked the directory.

    None if no launcher has locked the directory, or if the launcher's pid is unknown. A launcher
    writes its pid to the lock file just after it has locked the directory. Until then, the file has
    the pid of an earlier launcher.
    """
    for _ in range(_CLAIMS):
        if not is_locked(state_dir):
            return None
        text = (state_dir / "lock").read_text().strip()
        if text.isdigit() and _is_alive(int(text)):
            return int(text)
        time.sleep(_CLAIM_EVERY_S)
    return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def forget_run(state_dir: Path) -> bool:
    """Remove the files of a mesh that has ended, and return whether there were any.

    A later mesh or its instances would take these files for their own.
    """
    left = [mesh_file(state_dir), *(state_dir / "run").glob("*")]
    found = [path for path in left if path.is_file()]
    for path in found:
        path.unlink(missing_ok=True)
    return bool(found)


def hash_secret(state_dir: Path, given: Mapping[str, str]) -> str:
    """The secret key from which KV blocks' names are computed.

    Meshes that share a KV store get the same key from an environment variable. Otherwise the state
    directory has its own key.
    """
    return given.get("PDMESH_HASH_SECRET") or _secret(state_dir / "hash-secret")


def mesh_token(state_dir: Path, given: Mapping[str, str]) -> str:
    """The mesh token, which all processes of a mesh share.

    A mesh that spans machines gets the token from an environment variable. Otherwise the state
    directory has its own token. Raises BadSetting.
    """
    return _named_mesh_token(given) or _secret(_mesh_token_file(state_dir))


def known_mesh_token(state_dir: Path, given: Mapping[str, str]) -> str:
    """The existing mesh token, or an empty string. Raises BadSetting."""
    if named := _named_mesh_token(given):
        return named
    try:
        return (_mesh_token_file(state_dir)).read_text().strip()
    except OSError:
        return ""


def _mesh_token_file(state_dir: Path) -> Path:
    return state_dir / "mesh-token"


def _named_mesh_token(given: Mapping[str, str]) -> str:
    file = given.get("PDMESH_MESH_TOKEN_FILE")
    value = given.get("PDMESH_MESH_TOKEN", "")
    return read_secret("MESH_TOKEN", value, Path(file) if file else None, "a mesh token")


def _secret(path: Path) -> str:
    """Read a secret of the state directory. The first call makes the secret."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        secret = secrets.token_hex(32)
        write_atomically(path, secret)
        return secret
