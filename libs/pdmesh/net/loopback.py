"""Addresses to listen on: which of them nobody but this machine reaches (keys and tokens are
needed on all others), and how they are written with a port.
"""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """`localhost`, or a loopback address by number.

    Any other name is not: a resolver says where it leads, and it may say something else the next
    time.
    """
    return host == "localhost" or is_loopback_number(host)


def join(host: str, port: int) -> str:
    """`host:port`; IPv6 by number in its brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_loopback_number(host: str) -> bool:
    """A loopback address by number, IPv6 with its brackets or without."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
