"""Decides what may be exposed without a key or TLS: which ports, and which connections to servers.

An address that only this machine reaches needs no protection. For any other address there are three
rules. Clients need keys, unless anonymous calls are allowed. Processes of the mesh need TLS. No
connection to a server such as NATS or Redis is in plain text. An operator may declare a network
trusted (`PDMESH_INSECURE_NETWORK`). Plain text is then allowed, but processes without TLS must
still show the mesh's token.
"""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import urlsplit

from pdmesh.core.server_urls import server_urls

_NOT_IN_PLAIN_TEXT: Final = frozenset({"tls", "wss", "rediss", "rediss-sentinel", "unix"})


# --- which addresses only this machine reaches ---------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether `host` is `localhost` or a numeric loopback address.

    The result is false for any other name. The address of such a name comes from a resolver, which
    may give another address next time.
    """
    return host == "localhost" or is_loopback_number(host)


def is_loopback_number(host: str) -> bool:
    """Whether `host` is a numeric loopback address. An IPv6 address may be in brackets."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# --- what a port lacks before it may listen on `host` --------------------------------------------


def lacks_keys(host: str, *, has_keys: bool, is_anonymous_allowed: bool) -> bool:
    """Whether a gateway's port for clients needs keys and has none.

    `has_keys` means that the gateway has API keys, or accepts tokens of an identity provider.
    """
    return not (has_keys or is_anonymous_allowed or is_loopback(host))


def lacks_tls(host: str, *, has_tls: bool, is_trusted: bool) -> bool:
    """Whether a port for the mesh's own processes needs TLS and has none.

    `is_trusted` means that an operator trusts the network.
    """
    return not (has_tls or is_trusted or is_loopback(host))


def lacks_mesh_token(host: str, *, has_token: bool, has_tls: bool) -> bool:
    """Whether a port for the mesh's own processes needs TLS or the mesh's token, and has neither.

    With TLS, a caller shows a certificate. Without TLS, a caller must show the token.
    """
    return not (has_token or has_tls or is_loopback(host))


def lacks_secret(host: str, *, has_own_secret: bool) -> bool:
    """Whether an endpoint picker's port needs a secret known only to its mesh and has none.

    An endpoint picker tells a proxy which gateway takes a request. The secret signs the picker's
    plans, which name instances for a request.
    """
    return not (has_own_secret or is_loopback(host))


def is_page_local(*, has_tls: bool, is_trusted: bool) -> bool:
    """Whether the operators' page serves only this machine.

    `has_tls` means that the mesh's ports use TLS. The page has no TLS of its own, so in such a mesh
    it serves other machines only if the operator trusts the network.
    """
    return has_tls and not is_trusted


# --- what may leave the machine ------------------------------------------------------------------


def is_exposed(url: str) -> bool:
    """Whether data for any of the servers in `url` leaves this machine in plain text."""
    return any(map(_is_exposed, server_urls(url)))


def _is_exposed(url: str) -> bool:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    return parts.scheme not in _NOT_IN_PLAIN_TEXT and not is_loopback(parts.hostname or "")


def lacks_https(scheme: str, host: str, *, is_trusted: bool) -> bool:
    """Whether an OpenID provider's address needs https and has http.

    An attacker who could change the provider's keys in transit could make tokens.
    """
    return scheme == "http" and not is_trusted and not is_loopback(host)
