"""Decides what may be exposed without a key or TLS: which ports, and which connections to servers.

An address that only this machine reaches needs nothing. On any other address, clients need keys
unless anonymous calls are allowed, processes need TLS, and nothing is sent in plain text. An
operator may say that a network is trusted (`PDMESH_INSECURE_NETWORK`): then plain text is allowed,
but without TLS processes still need the mesh's token.
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

    No other name counts: a resolver decides where it leads, and may answer differently next time.
    """
    return host == "localhost" or is_loopback_number(host)


def is_loopback_number(host: str) -> bool:
    """Whether `host` is a numeric loopback address; IPv6 may have brackets."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# --- what a port lacks before it may listen on `host` --------------------------------------------


def lacks_keys(host: str, *, has_keys: bool, is_anonymous_allowed: bool) -> bool:
    """A gateway's port for clients. `has_keys`: API keys or tokens of a provider."""
    return not (has_keys or is_anonymous_allowed or is_loopback(host))


def lacks_tls(host: str, *, has_tls: bool, is_trusted: bool) -> bool:
    """A port for the mesh's own processes. `is_trusted`: an operator trusts the network."""
    return not (has_tls or is_trusted or is_loopback(host))


def lacks_mesh_token(host: str, *, has_token: bool, has_tls: bool) -> bool:
    """A port for the mesh's own processes: a caller shows a certificate, or at least the token."""
    return not (has_token or has_tls or is_loopback(host))


def lacks_secret(host: str, *, has_own_secret: bool) -> bool:
    """A port of an endpoint picker, whose plans are signed with the mesh's secret."""
    return not (has_own_secret or is_loopback(host))


def is_page_local(*, has_tls: bool, is_trusted: bool) -> bool:
    """Whether the operators' page serves only this machine: the page itself has no TLS."""
    return has_tls and not is_trusted


# --- what may leave the machine ------------------------------------------------------------------


def is_exposed(url: str) -> bool:
    """Whether what is sent to one of the servers at this URL leaves the machine in plain text."""
    return any(map(_is_exposed, server_urls(url)))


def _is_exposed(url: str) -> bool:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    return parts.scheme not in _NOT_IN_PLAIN_TEXT and not is_loopback(parts.hostname or "")


def lacks_https(scheme: str, host: str, *, is_trusted: bool) -> bool:
    """An OpenID provider. Anybody who could change its keys on their way could make tokens."""
    return scheme == "http" and not is_trusted and not is_loopback(host)
