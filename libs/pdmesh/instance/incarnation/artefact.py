"""Builds, fetches and verifies artefacts, so that an instance loads the files that were built (S17,
S20).

An artefact is a model made ready for one role, in a folder with a manifest. The manifest names the
role, each file with its hash, and the engine's settings for which the artefact was made. Prefill
and decode have different artefacts, and an instance refuses an artefact of another role. The
manifest's `revision` is a hash over the files and the settings that change the bytes of KV. So the
two artefacts of one model have the same revision, and an upgraded model has another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal

import structlog
from pydantic import Field, ValidationError

from pdmesh.atomic_file import write_atomically
from pdmesh.config import JsonObject
from pdmesh.core.model import Role
from pdmesh.instance.incarnation.role_settings import OPTIONS, RoleRefused
from pdmesh.kv.agent.wire import VERSION as KV_WIRE_VERSION

log = structlog.get_logger(__name__)

Measure = Callable[[str], AbstractContextManager[None]]
MANIFEST: Final = "manifest.json"
_FILES: Final = "files"
_MAX_MANIFEST: Final = 4 << 20  # bytes
_DECIDES_KV: Final = (
    "dtype", "kv_cache_dtype", "block_size", "sim_num_layers", "sim_token_bytes", "sim_seed",
)  # fmt: skip


class FileEntry(JsonObject):
    path: str = Field(min_length=1, max_length=512)  # relative to the folder `files`, with slashes
    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(JsonObject):
    version: Literal[1] = 1
    role: Literal["prefill", "decode", "fusion", "pooling", "encoder"]
    model: str = Field(min_length=1)  # the name clients use
    revision: str = Field(pattern=r"^[0-9a-f]{16}$")
    config: dict[str, str] = Field(default_factory=dict)  # settings of the instance, by name
    files: tuple[FileEntry, ...] = Field(max_length=10_000)


@dataclass(frozen=True, slots=True)
class Artefact:
    manifest: Manifest
    folder: Path  # contains the files

    @property
    def key(self) -> str:
        """A key of the files alone: two artefacts with the same files share a copy in the cache."""
        return _digest(self.manifest.files, {})

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each file, by path. `verify` checks that the files match."""
        return {entry.path: entry.sha256 for entry in self.manifest.files}


def read(path: Path) -> Artefact:
    """Read a manifest. Raises RoleRefused: BAD_MANIFEST."""
    try:
        if path.stat().st_size > _MAX_MANIFEST:
            raise RoleRefused(f"{path} is too long for a manifest", reason="BAD_MANIFEST")
        manifest = Manifest.model_validate_json(path.read_bytes())
    except OSError as exc:
        raise RoleRefused(f"{path}: {exc.strerror}", reason="BAD_MANIFEST") from exc
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, error["loc"]))
        text = f"{path}: {field}: {error['msg']}"
        raise RoleRefused(text, reason="BAD_MANIFEST", field=field) from None
    for entry in manifest.files:
        parts = PurePosixPath(entry.path).parts
        if ".." in parts or entry.path.startswith("/"):
            raise RoleRefused(f"{path}: {entry.path} leads elsewhere", reason="BAD_MANIFEST")
    return Artefact(manifest, path.parent / _FILES)


def check_role(artefact: Artefact, role: Role) -> None:
    """Raises RoleRefused: WRONG_ROLE."""
    if artefact.manifest.role != role.value:
        text = f"the artefact was made for {artefact.manifest.role}, not for {role.value}"
        raise RoleRefused(text, reason="WRONG_ROLE", field="role")


def fetch(artefact: Artefact, cache_dir: Path) -> Artefact:
    """Copy the artefact to the cache, unless the cache has a copy already.

    This call blocks. Raises RoleRefused: FETCH_FAILED.
    """
    target = cache_dir / artefact.key
    if not target.is_dir():
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache_dir, prefix="fetching-") as making:
                for entry in artefact.manifest.files:
                    to = Path(making) / _FILES / entry.path
                    to.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(artefact.folder / entry.path, to)
                    _write_through(to)
                with contextlib.suppress(OSError):  # another process was first
                    (Path(making) / _FILES).rename(target)
        except OSError as exc:
            raise RoleRefused(f"{exc.filename}: {exc.strerror}", reason="FETCH_FAILED") from exc
        if not target.is_dir():
            raise RoleRefused(f"{target} cannot be made", reason="FETCH_FAILED")
    return Artefact(artefact.manifest, target)


def fetch_again(artefact: Artefact, cache_dir: Path) -> Artefact:
    """Replace a copy that `verify` found damaged. Raises RoleRefused: FETCH_FAILED.

    This call blocks. A lock lets only one process at a time do this. If another process has
    replaced the copy, the new copy is kept.
    """
    target = cache_dir / artefact.key
    with (cache_dir / f"{artefact.key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_whole(Artefact(artefact.manifest, target)):
            with (
                tempfile.TemporaryDirectory(dir=cache_dir, prefix="damaged-") as aside,
                contextlib.suppress(FileNotFoundError),
            ):
                target.rename(Path(aside) / _FILES)
        return fetch(artefact, cache_dir)


def checked_copy(source: Artefact, cache_dir: Path, measure: Measure) -> Artefact:
    """Fetch the artefact to the cache, and verify the copy. Raises RoleRefused.

    A damaged copy is replaced once, because every later load would find the same damage. `measure`
    measures the times of `fetch` and `verify`.
    """
    with measure("fetch"):
        copy = fetch(source, cache_dir)
    try:
        with measure("verify"):
            verify(copy)
    except RoleRefused as exc:
        log.warning("artefact.damaged", folder=str(copy.folder), error=exc.message)
        with measure("fetch"):
            copy = fetch_again(source, cache_dir)
        with measure("verify"):
            verify(copy)
    return copy


def verify(artefact: Artefact) -> None:
    """Check that every file is there and unchanged since it was built.

    This call blocks. Raises RoleRefused: WRONG_HASH.
    """
    for entry in artefact.manifest.files:
        path = artefact.folder / entry.path
        try:
            is_right = path.stat().st_size == entry.size and _sha256(path) == entry.sha256
        except OSError as exc:
            raise RoleRefused(
                f"{path}: {exc.strerror}", reason="WRONG_HASH", field=entry.path
            ) from exc
        if not is_right:
            text = f"{path} is not the file of the manifest"
            raise RoleRefused(text, reason="WRONG_HASH", field=entry.path)


def _is_whole(artefact: Artefact) -> bool:
    try:
        verify(artefact)
    except RoleRefused:
        return False
    return True


def _write_through(path: Path) -> None:
    """Flush a file to disk. A power cut must not leave an incomplete folder with its final name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def build(
    model_dir: Path,
    role: Literal["prefill", "decode", "fusion", "pooling", "encoder"],
    out: Path,
    *,
    model: str = "",
    config: dict[str, str] | None = None,
) -> Path:
    """Make the artefact in the folder `out`, which must not exist. Returns the manifest's path.

    Files are linked if possible, or else copied. The folder gets its name only when it is complete.
    Raises RoleRefused, OSError.
    """
    config = dict(sorted((config or {}).items()))
    for name in config:
        if name not in OPTIONS:
            raise RoleRefused(f"{name} is no option of an engine", reason="BAD_OPTION", field=name)
    if out.exists():
        raise RoleRefused(f"{out} exists already", reason="BAD_MANIFEST", field="out")
    sources = sorted(_files_in(model_dir))
    if not sources:
        raise RoleRefused(f"{model_dir} holds no files", reason="BAD_MANIFEST", field="model_dir")
    out.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        entries = tuple(_add(model_dir, name, making / _FILES) for name in sources)
        manifest = Manifest(
            role=role,
            model=model or model_dir.resolve().name,
            revision=_digest(entries, {k: v for k, v in config.items() if k in _DECIDES_KV}),
            config=config,
            files=entries,
        )
        write_atomically(making / MANIFEST, manifest.model_dump_json(indent=2))
        (making / MANIFEST).chmod(0o644)  # other users load it
        making.chmod(0o755)
        making.rename(out)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    return out / MANIFEST


def _files_in(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts):
            yield path.relative_to(folder).as_posix()


def _add(model_dir: Path, name: str, files: Path) -> FileEntry:
    source, target = (model_dir / name).resolve(), files / name
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or a file system without links
        shutil.copyfile(source, target)
    return FileEntry(path=name, size=target.stat().st_size, sha256=_sha256(target))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(entries: tuple[FileEntry, ...], config: dict[str, str]) -> str:
    hashed = hashlib.sha256(b"kv%d" % KV_WIRE_VERSION)
    for entry in sorted(entries, key=lambda e: e.path):
        hashed.update(f"{entry.path}\0{entry.sha256}\n".encode())
    for name, value in sorted(config.items()):
        hashed.update(f"{name}={value}\n".encode())
    return hashed.hexdigest()[:16]
