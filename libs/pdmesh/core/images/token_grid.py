"""Computes how many tokens an image takes in a model that reads images in rows, as Qwen2-VL does.

The model resizes an image so that both sides are multiples of `factor` pixels. Each square of
`factor` by `factor` pixels becomes one token. A token has a position on each axis (M-RoPE). So two
images with the same number of tokens make different prompts if their numbers of rows differ.
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
        """The rows and columns of an image's tokens, computed as Qwen's `smart_resize` does.

        A large thin image keeps at least one row and one column. So it may take more tokens than
        `max_pixels` allows.
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
