"""Who may change the mesh: whoever knows the admin token, or, where none is set, whoever is on this machine."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pdmesh.config import BadSetting
from pdmesh.errors import NotAllowed
from pdmesh.net.loopback import is_loopback_number

_SCHEME: Final = "bearer "
MIN_TOKEN_CHARS: Final = 16


class AdminAccess:
    """`token` empty: none is set."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def check(self, metadata: Iterable[tuple[str, str | bytes]], peer: str) -> None:
        """Raises NotAllowed. `peer` is gRPC's name of the caller's address."""
        if self._token:
            if not hmac.compare_digest(_bearer(metadata), self._token):
                raise NotAllowed(
                    "the admin token is missing or wrong: `authorization: Bearer TOKEN`; pdmesh takes it from "
                    "PDMESH_ADMIN_TOKEN or PDMESH_ADMIN_TOKEN_FILE"
                )
        elif not is_local(peer):
            raise NotAllowed("without an admin token only calls from this machine are served")


def token_of(token: str, file: Path | None) -> str:
    """The token from its setting, or from its file; raises BadSetting."""
    if file is not None and not token:
        try:
            token = file.read_text().strip()
        except OSError as exc:
            raise BadSetting(f"PDMESH_ADMIN_TOKEN_FILE: {file}: {exc.strerror}") from exc
        if not token:
            raise BadSetting(f"PDMESH_ADMIN_TOKEN_FILE: {file} is empty")
    if token and len(token) < MIN_TOKEN_CHARS:
        raise BadSetting(
            f"PDMESH_ADMIN_TOKEN: an admin token has at least {MIN_TOKEN_CHARS} characters"
        )
    return token


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
