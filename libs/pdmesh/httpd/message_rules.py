"""Checks a request's head against rules of RFC 9112 that the HTTP parser does not enforce."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

Headers = Sequence[tuple[bytes, bytes]]  # names in lower case

# uri-host [":" port] of RFC 3986. The host is a name, an IPv4 address or an address in brackets,
# and may be empty.
_HOST: Final = re.compile(
    rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Za-z:._~!$&'()*+,;=-]+\])(?::[0-9]*)?"
)


def refusal(version: str, headers: Headers) -> int:
    """The status with which the head must be refused, or 0 to accept it."""
    if version not in {"1.0", "1.1"}:
        return 505
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        # 3.2: with two host headers, a cache in front may read another host than this server.
        return 400
    if hosts and not _HOST.fullmatch(hosts[0]):
        return 400
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and version == "1.0":
        return 400  # 6.1: the framing is faulty
    if codings and [value.lower().strip() for value in codings] != [b"chunked"]:
        return 501
    return 0
