"""The images of a request are checked and hashed once, and their memory is bounded."""

from __future__ import annotations

import asyncio
import base64
import gc
from typing import Any

import pytest

from pdmesh.core.images.image_bounds import ImageRefused, ImageRules
from pdmesh.core.images.prompt_image import digest_of
from pdmesh.errors import InvalidRequest, Overloaded
from pdmesh.services.gateway.images.fetching import FetchBounds, Fetcher, FetchTime
from pdmesh.services.gateway.images.loading import AskedImage, Images
from tests.support.images.files import data_uri, png, two_headers

SMALL, LARGE = png(1), png(2) + bytes(70_000)


class OneImage(Fetcher):
    def __init__(self) -> None:
        super().__init__(ImageRules(), FetchBounds(1.0))
        self.urls: list[str] = []
        self.times: list[FetchTime] = []

    async def fetch(self, url: str, time: FetchTime) -> bytes:
        self.times.append(time)
        self.urls.append(url)
        if url.endswith("bad"):
            raise ImageRefused("no")
        return LARGE


def images(fetcher: Fetcher | None = None, **bounds: Any) -> Images:
    values: dict[str, Any] = {
        "max_count": 3, "max_request_bytes": 200_000, "max_held_bytes": 300_000, **bounds,
    }  # fmt: skip
    return Images(ImageRules(max_bytes=100_000), fetcher or OneImage(), **values)


async def test_each_kind_of_image_becomes_bytes_and_a_digest() -> None:
    fetcher = OneImage()
    asked = [
        AskedImage("a", url=data_uri(SMALL)),
        AskedImage("b", base64=base64.b64encode(LARGE).decode()),
        AskedImage("c", data=SMALL),
        AskedImage("d", url="https://example.org/x"),
    ]
    loaded = await images(fetcher).load(asked)
    assert loaded.data == (SMALL, LARGE, SMALL, LARGE)
    assert loaded.digests == tuple(map(digest_of, loaded.data))
    assert fetcher.urls == ["https://example.org/x"]


async def test_the_images_of_a_request_share_one_time_to_be_fetched() -> None:
    fetcher = OneImage()
    shared = images(fetcher)
    asked = [AskedImage(str(at), url="https://example.org/x") for at in range(2)]
    for _ in range(2):
        await shared.load(asked)
    first, second, other, _ = fetcher.times
    assert first is second
    assert first is not other


@pytest.mark.parametrize("url", ["https://example.org/bad", "data:,", data_uri(b"x" * 70_000)])
async def test_a_refusal_names_the_field(url: str) -> None:
    asked = [AskedImage("a", data=SMALL), AskedImage("b.url", url=url)]
    with pytest.raises(InvalidRequest, match=r"b\.url: ") as refused:
        await images().load(asked)
    assert refused.value.field == "b.url"


async def test_images_are_held_as_long_as_their_request_and_within_a_bound() -> None:
    shared = images()
    asked = [AskedImage("a", data=LARGE)]
    held = [await shared.load(asked) for _ in range(4)]
    assert shared.num_held_bytes == 4 * len(LARGE)
    with pytest.raises(Overloaded):
        await shared.load(asked)
    assert shared.num_held_bytes == 4 * len(LARGE)
    held.pop()
    gc.collect()
    held.append(await shared.load(asked))
    held.clear()
    gc.collect()
    assert shared.num_held_bytes == 0


async def test_images_that_wait_to_be_read_count_as_they_were_given() -> None:
    """Any number of clients may send images at once, but only a few threads read images."""
    text = base64.b64encode(bytes(90_000)).decode()  # 120,000 bytes that are not an image
    shared = images()
    asked = [AskedImage("a", base64=text)]
    found = await asyncio.gather(*(shared.load(asked) for _ in range(9)), return_exceptions=True)
    refusals = [type(each) for each in found]
    assert refusals == [InvalidRequest] * 2 + [Overloaded] * 7
    assert shared.num_given_bytes == 0


async def test_a_request_with_a_bad_image_holds_none() -> None:
    shared = images(max_request_bytes=len(LARGE))
    for second in (AskedImage("b", data=b"x"), AskedImage("b", data=SMALL)):
        with pytest.raises(InvalidRequest):
            await shared.load([AskedImage("a", data=LARGE), second])
    gc.collect()
    assert shared.num_held_bytes == 0


async def test_the_pixels_of_a_requests_images_are_bounded_together() -> None:
    """Each image is small enough by itself."""
    shared = Images(
        ImageRules(max_pixels=64), OneImage(), max_count=8, max_request_bytes=200_000,
        max_held_bytes=300_000,
    )  # fmt: skip
    asked = [AskedImage(str(at), data=SMALL) for at in range(4)]
    assert len((await shared.load(asked)).data) == 4
    with pytest.raises(InvalidRequest, match=r"fifth: .* more than 256 pixels") as refused:
        await shared.load([*asked, AskedImage("fifth", data=png(1, 1, 1))])
    assert refused.value.field == "fifth"


@pytest.mark.parametrize("data", [png(1, 5000, 1), two_headers(300, 300)])
async def test_an_image_that_would_fill_the_memory_later_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await images().load([AskedImage("messages[0].content[1]", data=data)])
    assert refused.value.field == "messages[0].content[1]"


@pytest.mark.parametrize(("max_images", "most"), [(2, 2), (9, 3)])
def test_the_number_of_images_is_bounded(max_images: int, most: int) -> None:
    asked = [AskedImage(str(at)) for at in range(5)]
    images().check_count(asked[:most], max_images)
    with pytest.raises(InvalidRequest, match=f"at most {most}") as refused:
        images().check_count(asked, max_images)
    assert refused.value.field == str(most)
