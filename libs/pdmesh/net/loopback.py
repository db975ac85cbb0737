"""Which addresses nobody but this machine reaches: keys and tokens are needed on all others."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """`localhost`, or a loopback address by number. Any other name is not: a resolver says where it leads, and it may
    say something else the next time."""
    return host == "localhost" or is_loopback_number(host)


def is_loopback_number(host: str) -> bool:
    """A loopback address by number, IPv6 with its brackets or without."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
