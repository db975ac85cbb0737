"""A client of nats-py for `tls://` addresses. It never sends credentials without TLS.

nats-py itself obeys the server's first line (INFO), which an attacker in between may have written.
If this line does not ask for TLS, nats-py sends the password in plain text.
"""

from __future__ import annotations

import ssl
from typing import Any, Final

from nats.aio.client import Client

_HANDSHAKE_FIRST: Final = "tls_handshake_first"
# OpenSSL's errors for plain text where a handshake should begin. They depend on its version.
_PLAIN_TEXT: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})


class TlsClient(Client):
    """Connects to servers that send their first line after the TLS handshake, or before it.

    The order depends on the server's setting `handshake_first`. The client tries with the handshake
    first, and then the other order. In both orders, the handshake checks the server's certificate
    before the client sends CONNECT.
    """

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except Exception as exc:
            self._drop_connection()
            was_first = self.options[_HANDSHAKE_FIRST]
            if not was_first:
                self.options[_HANDSHAKE_FIRST] = True  # the server may have another setting by now
            if not was_first or not _is_other_order(exc):
                raise
            self.options[_HANDSHAKE_FIRST] = False
            assert self._current_server is not None, "it has been connected to"
            await self._connect_to_server(self._current_server)
            await self._process_connect_init()

    def _drop_connection(self) -> None:
        """Close the connection after a failed handshake. nats-py would wait forever for its end."""
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]  # nats-py's
        self._transport = None

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        info["tls_required"] = True  # whatever the server says
        await super()._process_info(info, initial_connection)


def _is_other_order(exc: Exception) -> bool:
    """Whether the error suggests that the server sends its first line before the handshake.

    If the line arrives before the client begins the handshake, nats-py reads it, and the handshake
    times out.
    """
    if isinstance(exc, ssl.SSLError):
        return exc.reason in _PLAIN_TEXT
    return isinstance(exc, TimeoutError)
