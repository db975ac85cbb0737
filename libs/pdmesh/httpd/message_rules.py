"""Rules of RFC 9112 that the parser does not enforce, decided from a request's head alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

Headers = Sequence[tuple[bytes, bytes]]  # names in lower case

# uri-host [":" port] of RFC 3986: a name, a number, or an address in brackets. It may be empty.
_HOST: Final = re.compile(
    rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Za-z:._~!$&'()*+,;=-]+\])(?::[0-9]*)?"
)


def refusal(version: str, headers: Headers) -> int:
    """The status with which a head is refused; 0 if it is accepted."""
    if version not in {"1.0", "1.1"}:
        return 505
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        # 3.2: there must be exactly one, or a cache in front may see another host than this server.
        return 400
    if hosts and not _HOST.fullmatch(hosts[0]):
        return 400
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and version == "1.0":
        return 400  # 6.1: the framing is faulty
    if codings and [value.lower().strip() for value in codings] != [b"chunked"]:
        return 501
    return 0
