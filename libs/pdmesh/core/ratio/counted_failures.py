"""Decides which failed requests are ignored when a scenario's ratio P:D is judged (S2).

P:D is the ratio of prefills to decodes.
"""

from __future__ import annotations

from pdmesh.errors import BY_REASON, InvalidRequest, MeshError


def is_by_client(reason: str) -> bool:
    """Whether a request failed because of the client's input, which no ratio could change."""
    return BY_REASON.get(reason, MeshError).http_status == InvalidRequest.http_status
