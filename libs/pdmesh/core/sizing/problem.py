"""The error of a plan that cannot be made: it names the field and says what to change."""

from __future__ import annotations


class SizingProblem(Exception):
    """`field` is what the user gave: model, gpu, scenario or one of its fields."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
