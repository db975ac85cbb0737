"""Addresses: which of them only this machine reaches, and how to write them with a port.

Addresses that other machines reach need keys, tokens and TLS.
"""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import urlsplit

from pdmesh.core.server_urls import server_urls

_NOT_IN_PLAIN_TEXT: Final = frozenset({"tls", "wss", "rediss", "rediss-sentinel", "unix"})


def is_loopback(host: str) -> bool:
    """Whether `host` is `localhost` or a numeric loopback address.

    No other name counts: a resolver decides where it leads, and may answer differently next time.
    """
    return host == "localhost" or is_loopback_number(host)


def is_exposed(url: str) -> bool:
    """Whether what is sent to one of the servers at this URL leaves the machine in plain text."""
    return any(map(_is_exposed, server_urls(url)))


def _is_exposed(url: str) -> bool:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    return parts.scheme not in _NOT_IN_PLAIN_TEXT and not is_loopback(parts.hostname or "")


def join(host: str, port: int) -> str:
    """`host:port`, with a numeric IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_loopback_number(host: str) -> bool:
    """Whether `host` is a numeric loopback address; IPv6 may have brackets."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_numeric(address: str) -> bool:
    """Whether `host:port` has a numeric host; IPv6 has brackets."""
    host, _, port = address.rpartition(":")
    try:
        version = ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).version
    except ValueError:
        return False
    return port.isdecimal() and (version == 4) is (not host.startswith("["))
