"""The error for a plan that cannot be made. It names the field and says what to change."""

from __future__ import annotations


class SizingProblem(Exception):
    """`field` is a part of the user's input: model, gpu, scenario or a field of the scenario."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
