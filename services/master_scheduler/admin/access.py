"""Decides which callers may change the mesh: callers with the admin token.

If no token is set, all callers on this machine may change it.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from typing import Final

from pdmesh.errors import NotAllowed
from pdmesh.net.loopback import is_loopback_number

_SCHEME: Final = "bearer "


class AdminAccess:
    """An empty `token` means that none is set. `page_url`: where operators find the page."""

    def __init__(self, token: str, page_url: Callable[[], str] = str) -> None:
        self._token, self.page_url = token.encode(), page_url

    def check(self, metadata: Iterable[tuple[str, str | bytes]], peer: str) -> None:
        """Raises NotAllowed. `peer` is gRPC's name of the caller's address."""
        if self._token:
            if not hmac.compare_digest(_bearer(metadata), self._token):
                raise NotAllowed(
                    "the admin token is missing or wrong: `authorization: Bearer TOKEN`; pdmesh "
                    "takes it from "
                    "PDMESH_ADMIN_TOKEN or PDMESH_ADMIN_TOKEN_FILE"
                )
        elif not is_local(peer):
            raise NotAllowed("without an admin token only calls from this machine are served")


def is_local(peer: str) -> bool:
    """`ipv4:127.0.0.1:4711`, `ipv6:[::1]:4711` (percent-encoded or not), `unix:...`."""
    kind, _, rest = peer.partition(":")
    if kind == "unix":
        return True
    return is_loopback_number(rest.replace("%5B", "[").replace("%5D", "]").rpartition(":")[0])


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    for key, value in metadata:
        if key == "authorization" and isinstance(value, str) and value.lower().startswith(_SCHEME):
            return value[len(_SCHEME) :].strip().encode()
    return b""
