"""Decides which loader reads an engine's weights: vLLM's, or ours, which keeps file order (S84).

vLLM's loader maps the files into memory in each rank. On a local disk, whose pages all ranks share,
that takes the least time. On storage behind a network or FUSE, the reads of every rank cost time,
and reads out of order cost more. There, one reader per node is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# Types of file systems whose reads go through a network or another process, as /proc/mounts names
# them. A name with a dot is one of FUSE's (fuse.sshfs).
REMOTE: Final = frozenset(
    {"fuse", "nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "9p", "virtiofs", "gpfs", "beegfs"}
)


class WeightsLoader(StrEnum):
    """The setting. With AUTO, the kind of storage decides."""

    AUTO = "auto"
    VLLM = "vllm"
    FILE_ORDER = "file_order"


@dataclass(frozen=True, slots=True)
class LoaderChoice:
    is_file_order: bool
    reason: str


def choose(asked: WeightsLoader, filesystem: str) -> LoaderChoice:
    """`filesystem`: the type of the file system that holds the weights; empty if unknown."""
    if asked is not WeightsLoader.AUTO:
        return LoaderChoice(asked is WeightsLoader.FILE_ORDER, "the setting")
    if filesystem in REMOTE or filesystem.startswith("fuse."):
        return LoaderChoice(True, f"{filesystem} is not a local disk")
    return LoaderChoice(False, "the disk is local")


def filesystem_of(path: str, mounts: str) -> str:
    """The type of the file system of an absolute path, from the text of /proc/mounts.

    Empty if none is found. Of several mounts at one place, the last one hides the others.
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
    """The kernel writes blanks and backslashes in octal."""
    for code, sign in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        place = place.replace(code, sign)
    return place


def _is_below(path: str, place: str) -> bool:
    return place == "/" or path == place or path.startswith(f"{place}/")
