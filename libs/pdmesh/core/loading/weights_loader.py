"""Decides which loader reads an engine's weights: vLLM's, or the project's file-order loader (S84).

With vLLM's loader, each rank maps the files into memory. This is fastest on a local disk, because
all ranks share the pages that the kernel has cached. On storage behind a network or FUSE, each
rank's reads take time, and reads out of order take more. There the file-order loader is faster: one
reader per node reads each file from start to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# Names in /proc/mounts of file systems that read through a network or another process. FUSE file
# systems may also have names such as fuse.sshfs.
REMOTE: Final = frozenset(
    {"fuse", "nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "9p", "virtiofs", "gpfs", "beegfs"}
)


class WeightsLoader(StrEnum):
    """The loader that the setting names. With AUTO, the kind of storage decides."""

    AUTO = "auto"
    VLLM = "vllm"
    FILE_ORDER = "file_order"


@dataclass(frozen=True, slots=True)
class LoaderChoice:
    is_file_order: bool
    reason: str


def choose(asked: WeightsLoader, filesystem: str) -> LoaderChoice:
    """`filesystem` is the type of the file system with the weights. It is empty if unknown."""
    if asked is not WeightsLoader.AUTO:
        return LoaderChoice(asked is WeightsLoader.FILE_ORDER, "the setting")
    if filesystem in REMOTE or filesystem.startswith("fuse."):
        return LoaderChoice(True, f"{filesystem} is not a local disk")
    return LoaderChoice(False, "the disk is local")


def filesystem_of(path: str, mounts: str) -> str:
    """The type of the file system of an absolute path. `mounts` is the text of /proc/mounts.

    The result is empty if none is found. If several file systems are mounted at one place, the last
    one hides the others.
    """
    found, longest = "", -1
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        place = _unescaped(fields[1])
        if _is_below(path, place) and len(place) >= longest:
            found, longest = fields[2], len(place)
    return found


def _unescaped(place: str) -> str:
    """Undo the octal escapes of the kernel for blanks and backslashes."""
    for code, sign in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        place = place.replace(code, sign)
    return place


def _is_below(path: str, place: str) -> bool:
    return place == "/" or path == place or path.startswith(f"{place}/")
