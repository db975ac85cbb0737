"""Images with too many bytes, too many pixels or too extreme a shape are refused."""

from __future__ import annotations

import pytest

from pdmesh.core.images.image_bounds import ImageRefused, ImageRules, check_image
from tests.support.images.files import bomb, png


def test_too_many_bytes_are_refused() -> None:
    data = png()
    assert check_image(data, ImageRules(max_bytes=len(data))).format == "png"
    with pytest.raises(ImageRefused, match=f"more than {len(data) - 1} bytes"):
        check_image(data, ImageRules(max_bytes=len(data) - 1))


def test_too_many_pixels_are_refused() -> None:
    assert check_image(png(1, 8, 8), ImageRules(max_pixels=64)).format == "png"
    for data in (png(1, 8, 9), bomb()):
        with pytest.raises(ImageRefused, match="pixels, and may have 64"):
            check_image(data, ImageRules(max_pixels=64))


@pytest.mark.parametrize(("width", "height"), [(5000, 1), (1, 201), (201, 1)])
def test_a_thin_image_is_refused_however_few_pixels_it_has(width: int, height: int) -> None:
    with pytest.raises(ImageRefused, match="one side may be 200 times the other"):
        check_image(png(1, width, height), ImageRules())
    assert check_image(png(1, min(width, 200), min(height, 200)), ImageRules())
