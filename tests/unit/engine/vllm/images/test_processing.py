"""Tests how image files are opened for vLLM, and which faults of a file are found."""

from __future__ import annotations

import io
from typing import Any

import pytest

from pdmesh.core.images.header import ImageHeader, read_header
from pdmesh.engine.vllm.images import processing
from pdmesh.engine.vllm.images.processing import opened
from pdmesh.errors import ImageUnusable, MeshError
from tests.support.images.files import exif, png, two_headers, with_segments

pytest.importorskip("PIL")


def test_a_size_that_is_not_the_headers_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This check finds sizes that the gateway's reader of headers has overlooked."""
    from PIL import ImageFile

    def load(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(processing, "read_header", lambda _: ImageHeader("png", 8, 9))
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(ImageUnusable, match="another size"):
        opened(png(1, 8, 8))
    monkeypatch.setattr(processing, "read_header", lambda _: ImageHeader("gif", 8, 8))
    with pytest.raises(ImageUnusable, match="UnidentifiedImageError"):
        opened(png(1, 8, 8))


@pytest.mark.parametrize("data", [two_headers(300, 300), png(1, 201, 1), b"BM" + bytes(60)])
def test_a_prefill_checks_the_header_again(data: bytes) -> None:
    with pytest.raises(MeshError) as refused:
        opened(data)
    assert refused.value.reason == "IMAGE_UNUSABLE"


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_real_files_have_the_size_that_their_header_says(form: str) -> None:
    """The files have comments and other data that often precede the pixels."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    text, out = PngInfo(), io.BytesIO()
    text.add_text("Comment", "x" * 1000)
    more: dict[str, dict[str, Any]] = {
        "PNG": {"pnginfo": text},
        "JPEG": {"progressive": True, "comment": b"y" * 5000},
        "WEBP": {"lossless": True, "exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"},
        "GIF": {"save_all": True, "append_images": [Image.new("RGB", (40, 30), "red")],
                "comment": b"z" * 1000},
    }  # fmt: skip
    Image.new("RGB", (40, 30), "blue").save(out, form, **more[form])
    assert opened(out.getvalue()).size == (40, 30)


@pytest.mark.parametrize("orientation", range(10))
def test_a_header_tells_how_a_decoder_turns_an_image(orientation: int) -> None:
    from PIL import Image, ImageOps

    out = io.BytesIO()
    Image.new("RGB", (40, 30), "blue").save(out, "JPEG")
    data = with_segments(exif(orientation), image=out.getvalue())
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert turned is not None
    assert read_header(data).shown_size == turned.size
