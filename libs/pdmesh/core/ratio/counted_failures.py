"""Decides which failed requests do not count where the ratio P:D is judged (S2)."""

from __future__ import annotations

from pdmesh.errors import BY_REASON, InvalidRequest, MeshError


def is_by_client(reason: str) -> bool:
    """Whether its client's input made a request fail, which no other ratio would have answered."""
    return BY_REASON.get(reason, MeshError).http_status == InvalidRequest.http_status
