"""Decides which models there are, and which model and scenario a request means.

A model is served while an instance takes requests for it. When the last such instance has left, the
model is away for `FORGET_S`, so that a restart of the instance does not make it unknown. After that
it is forgotten, as if it had never been.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from pdmesh.core.placement.plan import DEFAULT_MODEL, DEFAULT_SCENARIO

FORGET_S: Final = 300.0


@dataclass(frozen=True, slots=True, order=True)
class Offer:
    """Instances accept requests for this model in this scenario, or if it is empty, in all."""

    model: str
    scenario: str


@dataclass(slots=True)
class ModelCatalogue:
    """`preferred` is the model that `default` means, whether served or not. It may be empty."""

    preferred: str = ""
    # When the model was last offered, by model and scenario; inf: it is offered now.
    _seen: dict[str, dict[str, float]] = field(default_factory=dict)
    _since: dict[str, float] = field(default_factory=dict)  # when the model was first offered

    def see(self, offers: Collection[Offer], now: float) -> None:
        """Take all current offers. Call this whenever they may have changed."""
        for model, seen in list(self._seen.items()):
            for scenario, left_at in list(seen.items()):
                if left_at == _NOW and Offer(model, scenario) not in offers:
                    seen[scenario] = now
                elif now - left_at >= FORGET_S:
                    del seen[scenario]
            if not seen:
                del self._seen[model], self._since[model]
        for offer in offers:
            self._seen.setdefault(offer.model, {})[offer.scenario] = _NOW
            self._since.setdefault(offer.model, now)

    def since(self, model: str) -> float | None:
        """When the model was first served; None if it is unknown or forgotten."""
        return self._since.get(model)

    def resolve(self, asked: str, scenario: str, now: float) -> str | None:
        """The model that a request means, or None if no model has or lately had that name.

        `default` is the preferred model. If none is preferred, it is the first model by name of the
        request's scenario, and a served model comes before one that is away. So all gateways choose
        the same model.
        """
        if self._is_known(asked, now):  # a model may be called `default`
            return asked
        if asked not in ("", DEFAULT_MODEL):
            return asked if asked == self.preferred else None
        if self.preferred:
            return self.preferred
        wanted = scenario or DEFAULT_SCENARIO
        known = [m for m in self._seen if self._is_known(m, now)]
        found = [m for m in known if self.knows(m, wanted, now)] or known
        return min(found, key=lambda m: (not self._is_served(m), m), default=None)

    def knows(self, model: str, scenario: str, now: float) -> bool:
        """Whether the model is served in that scenario, or is away."""
        seen = self._seen.get(model, _NOWHERE)
        offered = (seen.get(scenario or DEFAULT_SCENARIO), seen.get(_ALL))
        return any(left_at is not None and now - left_at < FORGET_S for left_at in offered)

    def scenario_of(self, model: str, now: float) -> str:
        """The scenario of a request that names this model but no scenario.

        It is `default` if the model is served there, and otherwise the first scenario by name that
        serves the model.
        """
        seen = self._seen.get(model, _NOWHERE)
        known = [s for s, left_at in seen.items() if now - left_at < FORGET_S]

        def order(scenario: str) -> tuple[bool, bool, str]:
            is_plain = scenario in (_ALL, DEFAULT_SCENARIO)
            return seen[scenario] != _NOW, not is_plain, scenario

        return min(known, key=order, default=_ALL) or DEFAULT_SCENARIO

    def _is_known(self, model: str, now: float) -> bool:
        return any(now - left_at < FORGET_S for left_at in self._seen.get(model, _NOWHERE).values())

    def _is_served(self, model: str) -> bool:
        return _NOW in self._seen[model].values()

    def check_invariants(self) -> None:
        assert set(self._since) == set(self._seen)
        assert all(self._seen.values())


_NOW: Final = float("inf")
_ALL: Final = ""
_NOWHERE: Final[Mapping[str, float]] = MappingProxyType({})
