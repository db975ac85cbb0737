"""The errors for a missing or invalid key or token, and for a missing permission."""

from __future__ import annotations

from pdmesh.errors import MeshError


class Unauthenticated(MeshError):
    grpc_code, http_status, default_reason = "UNAUTHENTICATED", 401, "INVALID_API_KEY"


class NoApiKey(Unauthenticated):
    pass


class PermissionDenied(MeshError):
    grpc_code, http_status, default_reason = "PERMISSION_DENIED", 403, "PERMISSION_DENIED"
