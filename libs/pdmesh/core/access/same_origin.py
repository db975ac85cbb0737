"""Refuses requests to the operators' page that another site's page may have sent.

A page of another site can make the operator's browser send requests to the operators' page. The
`origin` of these requests names the other site. After DNS rebinding, their `host` names it instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdmesh.core.access.exposure import is_loopback
from pdmesh.errors import NotAllowed


def check_same_origin(headers: Mapping[str, str], *, has_token: bool) -> None:
    """Raises NotAllowed for a request that another page in the operator's browser may have sent.

    The names of `headers` are in lower case. `has_token` means that callers must show an admin
    token.
    """
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise NotAllowed("the content type must be application/json")
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None and origin.partition("://")[2] != host:
        raise NotAllowed("this request comes from another site's page")
    if not has_token and not _is_own(host):
        raise NotAllowed("without an admin token the address must be localhost or a loopback one")


def _is_own(host: str) -> bool:
    name, _, port = host.rpartition(":")
    return is_loopback(name if port.isdigit() else host)
