"""Decides how large an image may be: its bytes, its pixels, and the ratio of its sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdmesh.core.images.header import ImageHeader, NotAnImage, read_header

# A model enlarges an image until the shorter side has a certain length. So a long and thin image
# becomes very large.
MAX_RATIO: Final = 200  # the longer side may be this many times the shorter one
MAX_PIXELS: Final = 128 << 20  # `max_pixels` may be at most this; Pillow refuses 179 million


class ImageRefused(Exception):
    """The image is refused. The message is for the client, and never quotes the client's data."""


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Which images are accepted. Images are fetched only from `hosts`."""

    max_bytes: int = 8 << 20  # of one image
    max_pixels: int = 16 << 20  # of one image
    hosts: frozenset[str] = frozenset()  # "example.org" or "example.org:8443"


def check_image(data: bytes, rules: ImageRules) -> ImageHeader:
    """Raises ImageRefused."""
    if len(data) > rules.max_bytes:
        raise too_large(rules)
    try:
        header = read_header(data)
    except NotAnImage as exc:
        raise ImageRefused(str(exc)) from None
    if why := misfit_of(header, rules.max_pixels):
        raise ImageRefused(why)
    return header


def misfit_of(header: ImageHeader, max_pixels: int) -> str:
    """Why an image of this size is refused. The result is empty if it is accepted."""
    size = f"{header.width} x {header.height}"
    if header.num_pixels > max_pixels:
        return f"the image has {size} pixels, and may have {max_pixels}"
    if max(header.width, header.height) > MAX_RATIO * min(header.width, header.height):
        return f"the image has {size} pixels; one side may be {MAX_RATIO} times the other"
    return ""


def too_large(rules: ImageRules) -> ImageRefused:
    return ImageRefused(f"the image has more than {rules.max_bytes} bytes")
