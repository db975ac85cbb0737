"""Turns the images of a request into checked and hashed bytes, within bounds.

No pixels are decoded, because the header of an image has its size. Large images are read in
threads, a few at a time.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdmesh.core.images.header import ImageHeader
from pdmesh.core.images.image_bounds import ImageRefused, ImageRules, check_image
from pdmesh.core.images.prompt_image import digest_of
from pdmesh.core.images.source import data_of, decoded, is_data
from pdmesh.errors import InvalidRequest, Overloaded
from pdmesh.services.gateway.images.fetching import Fetcher, FetchTime

_INLINE_BYTES: Final = 65_536  # reading this many bytes takes less than a millisecond
_MAX_THREADS: Final = 2
_MAX_SUM: Final = 4  # a request may have the pixels of this many images of the largest size
MAX_SENT_BYTES: Final = 64 << 20  # of the images of a call, which are sent once for each choice


@dataclass(frozen=True, slots=True)
class AskedImage:
    """An image in a request: its URL, its base64 text, or its bytes.

    `format` is the format that the image must have, as in `ImageHeader`. If it is empty, every
    format is allowed.
    """

    field: str
    url: str = ""
    base64: str = ""
    data: bytes = b""
    format: str = ""
    format_field: str = ""


class Held:
    """The bytes of a request's images count as held as long as anything refers to this object."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class LoadedImages:
    """`sizes` has the width and height of each image in pixels, as the image is shown."""

    data: tuple[bytes, ...]
    digests: tuple[bytes, ...]
    sizes: tuple[tuple[int, int], ...]
    held: Held


class Images:
    """`max_count` is for one request. `max_held_bytes` is for all open requests together.

    Any number of requests may wait for the few threads that read large images. So waiting images
    count too, with the size of their URL, base64 text or bytes.
    """

    def __init__(
        self,
        rules: ImageRules,
        fetcher: Fetcher,
        *,
        max_count: int,
        max_request_bytes: int,
        max_held_bytes: int,
    ) -> None:
        self._rules, self._fetcher = rules, fetcher
        self._max_count, self._max_request_bytes = max_count, max_request_bytes
        self._max_held_bytes = max_held_bytes
        self._threads = asyncio.Semaphore(_MAX_THREADS)
        self.num_held_bytes = 0
        self.num_given_bytes = 0  # of images that wait to be read, as URL, base64 or bytes

    @property
    def num_bytes(self) -> int:
        return self.num_held_bytes + self.num_given_bytes

    def check_count(self, asked: Sequence[AskedImage], max_images: int) -> None:
        """`max_images` is the model's own bound. Raises InvalidRequest."""
        most = min(self._max_count, max_images)
        if len(asked) > most:
            message = f"at most {most} images are allowed in a request"
            raise InvalidRequest(message, field=asked[most].field)

    async def load(self, asked: Sequence[AskedImage]) -> LoadedImages:
        """Raises InvalidRequest with the field, or Overloaded."""
        num_given = sum(len(each.url) + len(each.base64) + len(each.data) for each in asked)
        self._check_room(self.num_given_bytes + num_given)
        self.num_given_bytes += num_given
        try:
            return await self._loaded(asked)
        finally:
            self.num_given_bytes -= num_given

    async def _loaded(self, asked: Sequence[AskedImage]) -> LoadedImages:
        held = Held()
        found: list[bytes] = []
        digests: list[bytes] = []
        sizes: list[tuple[int, int]] = []
        num_left = self._max_request_bytes
        max_pixels = num_pixels_left = _MAX_SUM * self._rules.max_pixels
        time = self._fetcher.time_of_request()
        for each in asked:
            try:
                data, digest, header = await self._one(each, time)
            except ImageRefused as exc:
                raise InvalidRequest(f"{each.field}: {exc}", field=each.field) from None
            _check_format(each, header)
            num_left -= len(data)
            if num_left < 0:
                text = f"{each.field}: the images have more than {self._max_request_bytes} bytes"
                raise InvalidRequest(text, field=each.field)
            num_pixels_left -= header.num_pixels
            if num_pixels_left < 0:
                text = f"{each.field}: the images have more than {max_pixels} pixels together"
                raise InvalidRequest(text, field=each.field)
            self._hold(held, len(data))
            found.append(data)
            digests.append(digest)
            sizes.append(header.shown_size)
        return LoadedImages(tuple(found), tuple(digests), tuple(sizes), held)

    async def _one(self, asked: AskedImage, time: FetchTime) -> tuple[bytes, bytes, ImageHeader]:
        """An image's bytes, digest and header. Raises ImageRefused."""
        if asked.url and not is_data(asked.url):
            data = await self._fetcher.fetch(asked.url, time)
            asked = AskedImage(asked.field, data=data)
        if len(asked.url) + len(asked.base64) + len(asked.data) <= _INLINE_BYTES:
            return self._read(asked)
        async with self._threads:
            return await asyncio.to_thread(self._read, asked)

    def _read(self, asked: AskedImage) -> tuple[bytes, bytes, ImageHeader]:
        if asked.url:
            data = data_of(asked.url, self._rules)
        else:
            data = decoded(asked.base64, self._rules) if asked.base64 else asked.data
        header = check_image(data, self._rules)
        return data, digest_of(data), header

    def _hold(self, held: Held, num_bytes: int) -> None:
        self._check_room(num_bytes)
        self.num_held_bytes += num_bytes
        weakref.finalize(held, self._give_back, num_bytes).atexit = False

    def _check_room(self, num_bytes: int) -> None:
        """Raises Overloaded if the gateway may not hold `num_bytes` more."""
        if self.num_held_bytes + num_bytes > self._max_held_bytes:
            raise Overloaded("this gateway holds too many images")

    def _give_back(self, num_bytes: int) -> None:
        self.num_held_bytes -= num_bytes


def _check_format(asked: AskedImage, header: ImageHeader) -> None:
    """Raises InvalidRequest."""
    if asked.format and asked.format != header.format:
        field = asked.format_field
        message = f"{field}: the image is a {header.format} image, not {asked.format}"
        raise InvalidRequest(message, field=field)
