"""How many tokens an image takes in a model that reads it in rows, as Qwen2-VL does.

The model resizes an image so that both sides are multiples of `factor`, and has a token for each
square of that side. Its tokens have a position on each axis (M-RoPE). So two images with the same
number of tokens, but in different rows, make different prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GridRule:
    """Lengths are in pixels. `min_pixels` is at least 1."""

    factor: int
    min_pixels: int
    max_pixels: int

    def grid_of(self, width: int, height: int) -> tuple[int, int]:
        """The rows and columns of tokens of an image of this size, as `smart_resize` finds them.

        An image that is thin and too large keeps at least one row and one column, so it may take
        more tokens than `max_pixels` allows.
        """
        side = self.factor
        rows, columns = round(height / side), round(width / side)
        num_pixels = rows * columns * side * side
        if num_pixels > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif num_pixels < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows, columns

    @property
    def most_tokens(self) -> int:
        """The most tokens that an image takes if it is not thin."""
        return self.max_pixels // self.factor**2
