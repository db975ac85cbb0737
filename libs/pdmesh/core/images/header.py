"""What an image file says of itself in its first bytes: its format and its size in pixels.

Nothing is decoded. So an image that would fill the memory when it is decoded is refused while it is
a few kilobytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_MAX_SEGMENTS: Final = 4096  # of a JPEG before its size
# JPEG's markers of a frame, which hold the size. C4, C8 and CC mean something else.
_FRAMES: Final = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_ALONE: Final = frozenset({0x01, *range(0xD0, 0xD9)})  # JPEG's markers without a segment


class NotAnImage(Exception):
    """The message says what is wrong; it never quotes the bytes."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    format: str  # as in a media type: png, jpeg, webp or gif
    width: int
    height: int

    @property
    def num_pixels(self) -> int:
        return self.width * self.height


def read_header(data: bytes) -> ImageHeader:
    """Raises NotAnImage."""
    try:
        if data.startswith(_PNG):
            found = _png(data)
        elif data.startswith(b"\xff\xd8"):
            found = _jpeg(data)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            found = _webp(data)
        elif data[:6] in (b"GIF87a", b"GIF89a"):
            found = ImageHeader("gif", _little(data, 6, 2), _little(data, 8, 2))
        else:
            raise NotAnImage("the data are no PNG, JPEG, WebP or GIF image")
    except IndexError:
        raise NotAnImage("the image ends within its header") from None
    if not found.num_pixels:
        raise NotAnImage("the image has no pixels")
    return found


def _png(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR":
        raise NotAnImage("the PNG image does not begin with its header")
    return ImageHeader("png", _big(data, 16, 4), _big(data, 20, 4))


def _jpeg(data: bytes) -> ImageHeader:
    """Walk over the segments to the first frame."""
    at = 2
    for _ in range(_MAX_SEGMENTS):
        if data[at] != 0xFF:
            raise NotAnImage("the JPEG image is damaged before its size")
        marker = data[at + 1]
        if marker == 0xFF:  # fill bytes may stand before a marker
            at += 1
        elif marker in _ALONE:
            at += 2
        elif marker in _FRAMES:
            return ImageHeader("jpeg", _big(data, at + 7, 2), _big(data, at + 5, 2))
        elif marker == 0xD9 or marker == 0xDA:
            break
        else:
            at += 2 + max(2, _big(data, at + 2, 2))
    raise NotAnImage("the JPEG image does not say its size")


def _webp(data: bytes) -> ImageHeader:
    match data[12:16]:
        case b"VP8X":
            return ImageHeader("webp", 1 + _little(data, 24, 3), 1 + _little(data, 27, 3))
        case b"VP8L" if data[20] == 0x2F:
            bits = _little(data, 21, 4)
            return ImageHeader("webp", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
        case b"VP8 " if data[23:26] == b"\x9d\x01\x2a":
            return ImageHeader("webp", _little(data, 26, 2) & 0x3FFF, _little(data, 28, 2) & 0x3FFF)
        case _:
            raise NotAnImage("the WebP image does not say its size")


def _big(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(_bytes(data, at, size), "big")


def _little(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(_bytes(data, at, size), "little")


def _bytes(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise IndexError
    return data[at : at + size]
