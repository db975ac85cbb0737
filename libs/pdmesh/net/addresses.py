"""Formats and checks addresses of the form `host:port`."""

from __future__ import annotations

import ipaddress


def join(host: str, port: int) -> str:
    """`host:port`, with a numeric IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_numeric(address: str) -> bool:
    """Whether `host:port` has a numeric host. A numeric IPv6 host must be in brackets."""
    host, _, port = address.rpartition(":")
    try:
        version = ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).version
    except ValueError:
        return False
    return port.isdecimal() and (version == 4) is (not host.startswith("["))
