"""Identifies a gRPC caller by its certificate, and checks whether it may make the call.

Without mutual TLS, callers have no certificates and every check here passes. Then only the mesh
token keeps strangers out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import grpc

from pdmesh.core.access.process_identity import ProcessIdentity, callers_of
from pdmesh.errors import WrongPeer
from pdmesh.net.tls.own_certificate import own_certificates

Context = grpc.aio.ServicerContext[Any, Any]


def check_caller(method: str, context: Context) -> None:
    """Raises WrongPeer if this process has a certificate and the caller may not call `method`.

    `method` has the form /package.Service/Method.
    """
    callers = callers_of(method)
    if callers is not None:
        check_role(method, context, callers)


def check_role(method: str, context: Context, callers: Collection[str]) -> None:
    """Raises WrongPeer if this process has a certificate and the caller has none of the roles."""
    own = own_certificates()
    if own is None:
        return
    caller = caller_of(context)
    if caller is None or caller.trust_domain != own.identity.trust_domain:
        raise WrongPeer(f"{method}: the caller's certificate names no process of this mesh")
    if caller.role not in callers:
        raise WrongPeer(f"{method} is not for {caller}, but for: {', '.join(sorted(callers))}")


def check_says(caller: ProcessIdentity | None, instance_id: str, field: str) -> None:
    """Raises WrongPeer if the caller has a certificate that names another instance."""
    if caller is not None and caller.instance_id != instance_id:
        raise WrongPeer(f"the certificate is for {caller}, not {instance_id!r}", field=field)


def caller_of(context: Context) -> ProcessIdentity | None:
    """The process that the caller's certificate names. None without TLS or without such a name."""
    if own_certificates() is None:
        return None
    uris = context.auth_context().get("peer_spiffe_id", ())
    try:
        (uri,) = uris
        return ProcessIdentity.from_uri(uri.decode())
    except ValueError:
        return None
