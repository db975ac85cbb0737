"""Measures the memory of a mesh's processes."""

from __future__ import annotations

from pathlib import Path

from pdmesh.launcher.mesh import Mesh

_PAGE_BYTES = 4096


def rss_bytes(mesh: Mesh, process: str) -> int:
    """The resident memory of a process, in bytes."""
    return int(Path(f"/proc/{mesh.pid(process)}/statm").read_text().split()[1]) * _PAGE_BYTES
