"""The size of an image is read from the first bytes of its file."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.images.header import ImageHeader, NotAnImage, read_header
from tests.support.images.files import (
    bomb,
    exif,
    gif,
    jpeg,
    png,
    two_headers,
    webp,
    with_segments,
)

FILES = [
    (png(1, 5, 7), "png"), (gif(), "gif"), (jpeg(), "jpeg"),
    (webp("VP8 "), "webp"), (webp("VP8L"), "webp"), (webp("VP8X"), "webp"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "form"), FILES)
def test_each_format_tells_its_size(data: bytes, form: str) -> None:
    assert read_header(data) == ImageHeader(form, 5, 7)


@pytest.mark.parametrize(("data", "form"), FILES)
def test_a_file_that_ends_within_its_header_is_no_image(data: bytes, form: str) -> None:
    for end in range(10):
        with pytest.raises(NotAnImage):
            read_header(data[:end])
    assert read_header(data + b"more") == ImageHeader(form, 5, 7)


@pytest.mark.parametrize(
    "data",
    [two_headers(50, 50), jpeg(frames=2), gif(4, 7), gif(5, 6), gif(5, 7, (1, 0, 5, 7)),
     gif(1, 1, (0, 0, 60_000, 60_000))],
)  # fmt: skip
def test_a_file_with_two_sizes_is_refused(data: bytes) -> None:
    """The check and the decoder might use different sizes."""
    with pytest.raises(NotAnImage, match=r"two headers|twice|larger than its screen"):
        read_header(data)


@pytest.mark.parametrize("is_big_endian", [False, True])
@pytest.mark.parametrize("orientation", range(10))
def test_a_camera_says_how_its_image_is_shown(orientation: int, is_big_endian: bool) -> None:
    header = read_header(with_segments(exif(orientation, is_big_endian=is_big_endian)))
    assert (header.width, header.height) == (5, 7)
    assert header.shown_size == ((7, 5) if orientation in (5, 6, 7, 8) else (5, 7))


@given(st.binary(max_size=60))
def test_damaged_exif_data_leave_an_image_upright_or_turn_it(damaged: bytes) -> None:
    for start in (b"", b"II*\0", b"MM\0*"):
        header = read_header(with_segments(b"Exif\0\0" + start + damaged))
        assert header.shown_size in {(5, 7), (7, 5)}


def test_only_the_first_exif_data_count() -> None:
    """Decoders append later segments to the first one, and reading them would cost time."""
    assert read_header(with_segments(exif(1), exif(6))).shown_size == (5, 7)
    assert read_header(with_segments(exif(6), exif(1))).shown_size == (7, 5)


def test_a_bomb_tells_its_pixels_without_being_decoded() -> None:
    assert read_header(bomb()).num_pixels == 10**10


@pytest.mark.parametrize(
    "data",
    [b"", b"<svg/>", b"BM" + bytes(60), b"\x00\x00\x00\x1cftypavif", png(1, 0, 7), gif(0, 0),
     b"\xff\xd8\xff\xda\x00\x02", b"\xff\xd8\xff\xd9", b"\xff\xd8" + b"\xff" * 100_000],
)  # fmt: skip
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(NotAnImage):
        read_header(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8" + b"\xff\xfe\x00\x02" * 1_000_000 + jpeg()[2:],
        jpeg()[:-2] + b"\xff\xfe\x00\x02" * 1_000_000 + b"\xff\xda",
        png()[:33] + (bytes(4) + b"tEXt" + bytes(4)) * 500_000 + png()[33:],
        gif()[:25] + b"\x21\xfe" + b"\x01x" * 1_000_000 + b"\x00" + gif()[25:],
        gif()[:25] + b"\x21\xfe\x00" * 1_000_000 + gif()[25:],
    ],
    ids=["jpeg", "jpeg after its size", "png", "gif", "gif of many"],
)
def test_the_search_is_bounded(data: bytes) -> None:
    """Each part without content costs only a few bytes, so a file could have very many."""
    with pytest.raises(NotAnImage, match=r"too many parts|damaged before"):
        read_header(data)


@given(
    st.sampled_from([data for data, _ in FILES]), st.lists(st.tuples(st.integers(0), st.binary()))
)
def test_damaged_files_are_read_or_refused(data: bytes, changes: list[tuple[int, bytes]]) -> None:
    for at, put in changes:
        at %= len(data) + 1
        data = data[:at] + put + data[at + len(put) :]
    with contextlib.suppress(NotAnImage):
        assert read_header(data).num_pixels > 0
