"""Small image files for tests, made without an image library."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Literal


def png(seed: int = 0, width: int = 8, height: int = 8) -> bytes:
    """A valid PNG of one colour. Each seed gives another colour."""
    row = b"\0" + bytes((seed * 7 % 256, seed * 13 % 256, seed // 256 % 256)) * width
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(row * height)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def two_headers(width: int, height: int) -> bytes:
    """A valid PNG of this size, preceded by a false header that claims one pixel."""
    whole = png(1, width, height)
    return whole[:8] + png(1, 1, 1)[8:33] + whole[8:]


def bomb() -> bytes:
    """A small PNG that claims to have 10 billion pixels."""
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", b"")


def gif(width: int = 5, height: int = 7, frame: tuple[int, int, int, int] = (0, 0, 5, 7)) -> bytes:
    """The beginning of a GIF, up to the place of its first frame.

    It has a colour table and a comment before the frame.
    """
    table, comment = bytes(12), b"\x21\xfe\x02hi\x01!\x00"
    screen = struct.pack("<HHBBB", width, height, 0x81, 0, 0)
    return b"GIF89a" + screen + table + comment + b"," + struct.pack("<HHHH", *frame)


def jpeg(width: int = 5, height: int = 7, frames: int = 1) -> bytes:
    """The beginning of a JPEG, up to its pixels. A comment precedes the size."""
    comment = b"\xff\xfe" + struct.pack(">H", 6) + b"\xff\xd9hi"
    frame = b"\xff\xff\xc2" + struct.pack(">HBHHB", 11, 8, height, width, 1) + bytes(3)
    return b"\xff\xd8" + comment + frames * frame + b"\xff\xda"


def exif(orientation: int, *, is_big_endian: bool = False) -> bytes:
    """EXIF data in the form that cameras write. The second of its two tags is the orientation."""
    order: Literal["big", "little"] = "big" if is_big_endian else "little"

    def number(value: int, size: int) -> bytes:
        return value.to_bytes(size, order)

    def tag(name: int, value: int) -> bytes:
        return number(name, 2) + number(3, 2) + number(1, 4) + number(value, 2) + bytes(2)

    head = (b"MM\0*" if is_big_endian else b"II*\0") + number(8, 4)
    directory = number(2, 2) + tag(0x0100, 6) + tag(0x0112, orientation) + bytes(4)
    return b"Exif\0\0" + head + directory


def with_segments(*data: bytes, image: bytes = jpeg()) -> bytes:
    """A JPEG with application data before its size."""
    made = b"".join(b"\xff\xe1" + (2 + len(each)).to_bytes(2, "big") + each for each in data)
    return image[:2] + made + image[2:]


def webp(kind: str = "VP8 ", width: int = 5, height: int = 7) -> bytes:
    match kind:
        case "VP8X":
            body = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        case "VP8L":
            body = b"\x2f" + (width - 1 | height - 1 << 14).to_bytes(4, "little")
        case _:
            body = bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", width, height)
    chunk = kind.encode() + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def data_uri(data: bytes, media: str = "image/png") -> str:
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
