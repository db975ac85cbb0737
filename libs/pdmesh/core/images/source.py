"""Decides where an image may come from: the request itself, or an allowed host.

A client can make the gateway fetch an image from an address. So the gateway fetches only from hosts
that an operator has named, and only at public addresses. It follows no redirects. `image_bounds.py`
decides how large an image may be.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from pdmesh.core.images.image_bounds import ImageRefused, ImageRules, too_large

MAX_URL_CHARS: Final = 2048  # of an address; a data: URI has another bound
_PIECE_CHARS: Final = 65_536  # a multiple of 4; decoding takes some 0.2 ms
_DATA_URI: Final = re.compile(r"(?i:data):([A-Za-z0-9.+-]{1,64}/[A-Za-z0-9.+-]{1,64})?;base64,")
_PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?")
# The characters that a request line may have: no spaces, no control characters, only ASCII. The
# unparsed address is checked, because the parser removes tabs, newlines and leading control
# characters.
_PRINTABLE: Final = re.compile(r"[!-~]*")


@dataclass(frozen=True, slots=True)
class ImageAddress:
    """A parsed and allowed address."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        return self.host if self.port == _PORTS[self.scheme] else f"{self.host}:{self.port}"


def is_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def data_of(url: str, rules: ImageRules) -> bytes:
    """The bytes in a data: URI. Raises ImageRefused."""
    found = _DATA_URI.match(url[:256])
    if found is None:
        raise ImageRefused("an image's data: URI must have the form data:image/TYPE;base64,DATA")
    return decoded(url[found.end() :], rules)


def decoded(text: str, rules: ImageRules) -> bytes:
    """The bytes of base64 text. Raises ImageRefused.

    The text is decoded in pieces. While the library decodes a piece, no other thread runs.
    """
    if len(text) > 4 * (rules.max_bytes // 3 + 1):
        raise too_large(rules)
    found = bytearray()
    try:
        # Padding is allowed only at the end of the whole text. The library sees only one piece.
        if 0 <= text.find("=") < len(text) - 2:
            raise ValueError
        for at in range(0, len(text), _PIECE_CHARS):
            found += base64.b64decode(text[at : at + _PIECE_CHARS], validate=True)
    except (binascii.Error, ValueError):
        raise ImageRefused("the image is not valid base64") from None
    return bytes(found)


def address_of(url: str, hosts: Collection[str]) -> ImageAddress:
    """The address to fetch an image from. Raises ImageRefused.

    The URL is parsed only once, so the parts that are checked are the parts that are used.
    """
    if len(url) > MAX_URL_CHARS or not _PRINTABLE.fullmatch(url):
        raise ImageRefused(
            f"an address must have at most {MAX_URL_CHARS} characters, all of them printable "
            "ASCII and no spaces"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ImageRefused("this is not a valid address") from None
    if parts.scheme not in _PORTS:
        raise ImageRefused("an image must be a data: URI, or have an http or https address")
    if "@" in parts.netloc or "\\" in url:
        raise ImageRefused("an address must not have a user or a backslash")
    host = (parts.hostname or "").lower()
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not _HOST.fullmatch(host) or not path.startswith("/"):
        raise ImageRefused("this is not a valid address")
    address = ImageAddress(parts.scheme, host, port or _PORTS[parts.scheme], path)
    if address.authority not in hosts:
        raise ImageRefused(
            "images are fetched from no other hosts than those that the operator of this gateway "
            "allows; send it as a data: URI"
        )
    return address


def is_public(ip: str) -> bool:
    """Whether the address is public: not private, loopback, link-local or otherwise special."""
    try:
        found: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(ip)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if found not in _GLOBAL_UNICAST:
            return False
    return found.is_global and not found.is_multicast and found != _AZURE


# All public IPv6 addresses are in this range. Python also calls some other addresses global.
_GLOBAL_UNICAST: Final = ipaddress.ip_network("2000::/3")
# DNS64 embeds an IPv4 address in the last 32 bits after this prefix, and those bits are checked. A
# network may use another prefix, which cannot be recognised. Addresses with such a prefix are
# refused only if they are outside 2000::/3.
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
# Azure's hosts give settings to their virtual machines at this address. It looks public.
_AZURE: Final = ipaddress.ip_address("168.63.129.16")
