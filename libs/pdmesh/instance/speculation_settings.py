"""The option `speculation` of an instance: how a decode proposes tokens, and how many."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pdmesh.config import JsonObject
from pdmesh.core.speculation.proposal_length import NO_SPECULATION, Method, Speculation
from pdmesh.instance.json_option import FROM_TEXT

_WITH_MODEL = ("draft_model", "eagle")


class SpeculationSettings(JsonObject):
    """`k` is the most tokens that a decode proposes per step.

    With the schedule `adaptive`, the decode proposes fewer tokens in larger batches, and for text
    that is hard to predict. With `fixed`, it always proposes `k`.
    """

    method: Literal["none", "prompt_lookup", "suffix", "draft_model", "eagle", "mtp"]
    model: str = Field("", max_length=4096)
    k: int = Field(4, ge=1, le=16)
    schedule: Literal["adaptive", "fixed"] = "adaptive"

    @model_validator(mode="after")
    def _model_fits_method(self) -> Self:
        if bool(self.model) != (self.method in _WITH_MODEL):
            needs = "needs" if self.method in _WITH_MODEL else "takes no"
            raise ValueError(f"the method {self.method} {needs} model")
        return self

    def speculation(self, acceptance: float, token_cost: float) -> Speculation:
        if self.method == "none":
            return NO_SPECULATION
        return Speculation(
            self.k,
            acceptance,
            token_cost,
            Method(self.method),
            self.model,
            is_fixed=self.schedule == "fixed",
        )


SpeculationOption = Annotated[SpeculationSettings | None, FROM_TEXT]
