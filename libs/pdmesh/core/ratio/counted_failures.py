"""Decides which failed requests do not count where the ratio P:D is judged (S2)."""

from __future__ import annotations

from pdmesh.errors import BY_REASON, InvalidRequest, MeshError


def is_by_client(reason: str) -> bool:
    """Whether a request failed for what its client wrote: no other ratio would have answered it."""
    return BY_REASON.get(reason, MeshError).http_status == InvalidRequest.http_status
