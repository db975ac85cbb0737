"""Reads the format and the size in pixels from the first bytes of an image file.

Nothing is decoded. So a file of a few kilobytes that would fill the memory when decoded is refused
early. A PNG or JPEG file that states its size twice is refused, because a decoder may use the other
size. A JPEG file may also state an orientation. Cameras write it, and decoders rotate the pixels
accordingly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_MAX_SEGMENTS: Final = 4096  # the most parts of a file before its pixels
# The JPEG markers of a frame, which states the size. C4, C8 and CC are no frames.
_FRAMES: Final = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_EXIF: Final = b"Exif\0\0"
_ORIENTATION: Final = 0x0112
_ON_ITS_SIDE: Final = range(5, 9)  # orientations that exchange width and height
_ALONE: Final = frozenset({0x01, *range(0xD0, 0xD9)})  # the JPEG markers without a segment


class NotAnImage(Exception):
    """The message says what is wrong with the file. It never quotes bytes of the file."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    format: str  # as in a media type: png, jpeg, webp or gif
    width: int
    height: int
    is_on_its_side: bool = False  # the image is shown with its width and height exchanged

    @property
    def shown_size(self) -> tuple[int, int]:
        """The width and height of the image as it is shown. Models get the image in this
        orientation.
        """
        size = (self.width, self.height)
        return size[::-1] if self.is_on_its_side else size

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
            found = _gif(data)
        else:
            raise NotAnImage("the data are no PNG, JPEG, WebP or GIF image")
    except IndexError:
        raise NotAnImage("the image ends within its header") from None
    if not found.num_pixels:
        raise NotAnImage("the image has no pixels")
    return found


def _png(data: bytes) -> ImageHeader:
    """Read the chunks up to the pixels, because decoders use the last size before the pixels."""
    if data[12:16] != b"IHDR":
        raise NotAnImage("the PNG image does not begin with its header")
    at = len(_PNG)
    for _ in range(_MAX_SEGMENTS):
        at += 12 + _big(data, at, 4)
        kind = _bytes(data, at + 4, 4)
        if kind == b"IHDR":
            raise NotAnImage("the PNG image has two headers")
        if kind == b"IDAT":
            return ImageHeader("png", _big(data, 16, 4), _big(data, 20, 4))
    raise NotAnImage("the PNG image has too many parts before its pixels")


def _gif(data: bytes) -> ImageHeader:
    """Skip the extensions up to the first frame.

    Decoders enlarge the image if the first frame is larger than the stated size.
    """
    header = ImageHeader("gif", _little(data, 6, 2), _little(data, 8, 2))
    flags = _little(data, 10, 1)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    is_in_extension = False
    for _ in range(_MAX_SEGMENTS):
        kind = _little(data, at, 1)
        if is_in_extension:  # `kind` is the length of a block; an empty block is the last one
            at += 1 + kind
            is_in_extension = kind != 0
        elif kind == 0x21:
            at += 2
            is_in_extension = True
        elif kind == 0x2C:
            left, top, width, height = (_little(data, at + 1 + 2 * i, 2) for i in range(4))
            if left + width > header.width or top + height > header.height:
                raise NotAnImage("the GIF image's first frame is larger than its screen")
            return header
        else:
            break
    raise NotAnImage("the GIF image is damaged before its first frame")


def _jpeg(data: bytes) -> ImageHeader:
    """Read the segments up to the pixels, because decoders use the last size before the pixels."""
    at, found, orientation = 2, None, 0
    for _ in range(_MAX_SEGMENTS):
        if _little(data, at, 1) != 0xFF:
            raise NotAnImage("the JPEG image is damaged before its pixels")
        marker = _little(data, at + 1, 1)
        if marker == 0xFF:  # fill bytes may stand before a marker
            at += 1
        elif marker in _ALONE:
            at += 2
        elif marker == 0xD9 or marker == 0xDA:
            break
        else:
            if marker in _FRAMES:
                if found is not None:
                    raise NotAnImage("the JPEG image says its size twice")
                found = ImageHeader("jpeg", _big(data, at + 7, 2), _big(data, at + 5, 2))
            elif marker == 0xE1 and not orientation and data.startswith(_EXIF, at + 4):
                end = at + 2 + _big(data, at + 2, 2)
                orientation = _orientation(data[at + 4 + len(_EXIF) : end])
            at += 2 + max(2, _big(data, at + 2, 2))
    else:
        raise NotAnImage("the JPEG image has too many parts before its pixels")
    if found is None:
        raise NotAnImage("the JPEG image does not say its size")
    return replace(found, is_on_its_side=orientation in _ON_ITS_SIDE)


def _orientation(exif: bytes) -> int:
    """The orientation in the first directory of Exif tags, or 1 (upright) if there is none."""
    number = {b"II*\0": _little, b"MM\0*": _big}.get(exif[:4])
    if number is None:
        return 1
    try:
        directory = number(exif, 4, 4)
        for index in range(number(exif, directory, 2)):
            entry = directory + 2 + 12 * index
            if number(exif, entry, 2) == _ORIENTATION:
                return number(exif, entry + 8, 2) or 1
    except IndexError:
        pass
    return 1


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
