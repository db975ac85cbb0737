"""Decides which models a gateway knows, and which model and scenario a request means.

A scenario is a kind of requests with its own instances. A model is served while an instance accepts
requests for it. When the last such instance has left, the model is "away" for `FORGET_S`: its name
stays known, because the instance may only restart. After that the model is unknown.
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
    """At least one instance accepts requests for this model in this scenario.

    An empty scenario means all scenarios.
    """

    model: str
    scenario: str


@dataclass(slots=True)
class ModelCatalogue:
    """`preferred` is the model that the name `default` means, even if it is not served. It may be
    empty.
    """

    preferred: str = ""
    # By model and scenario: when the model was last offered. Infinity: it is offered now.
    _seen: dict[str, dict[str, float]] = field(default_factory=dict)
    _since: dict[str, float] = field(default_factory=dict)  # when the model was first offered
    # Every request looks these two up, so `see` computes them in advance. `_served` has the
    # scenario of each model that is served now. `_defaults` has the model that `default` means in
    # each scenario. `_defaults` is filled only while no model is away, because otherwise its values
    # would depend on time.
    _served: dict[str, str] = field(default_factory=dict)
    _defaults: dict[str, str] = field(default_factory=dict)

    def see(self, offers: Collection[Offer], now: float) -> None:
        """Replace the known offers by all current ones.

        Call this whenever they may have changed.
        """
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
        self._served = {}
        for offer in sorted(offers, key=lambda offer: _plain_first(offer.scenario)):
            self._served.setdefault(offer.model, offer.scenario or DEFAULT_SCENARIO)
        self._defaults = {}
        if self._is_steady():
            scenarios = {DEFAULT_SCENARIO, *(offer.scenario for offer in offers)}
            found = ((each, self._first_of(each, now)) for each in sorted(scenarios))
            self._defaults = {scenario: model for scenario, model in found if model is not None}

    def _is_steady(self) -> bool:
        """Whether no model is away from any scenario."""
        return all(left_at == _NOW for seen in self._seen.values() for left_at in seen.values())

    def since(self, model: str) -> float | None:
        """When the model was first served. None means that it is unknown or forgotten."""
        return self._since.get(model)

    def resolve(self, asked: str, scenario: str, now: float) -> str | None:
        """The model that a request means, or None if there is no such model.

        The name `default` means the preferred model. If none is preferred, it means the scenario's
        first model by name. If the scenario has no model, it means the first of all models. Models
        that are served come before models that are away. So all gateways choose the same model.
        """
        if asked in self._served or self._is_known(asked, now):  # a model may be named `default`
            return asked
        if asked not in ("", DEFAULT_MODEL):
            return asked if asked == self.preferred else None
        if self.preferred:
            return self.preferred
        wanted = scenario or DEFAULT_SCENARIO
        return self._defaults.get(wanted) or self._first_of(wanted, now)

    def _first_of(self, scenario: str, now: float) -> str | None:
        known = [m for m in self._seen if self._is_known(m, now)]
        found = [m for m in known if self.knows(m, scenario, now)] or known
        return min(found, key=lambda m: (m not in self._served, m), default=None)

    def knows(self, model: str, scenario: str, now: float) -> bool:
        """Whether the model is served in that scenario, or is away."""
        seen = self._seen.get(model, _NOWHERE)
        offered = (seen.get(scenario or DEFAULT_SCENARIO), seen.get(_ALL))
        return any(left_at is not None and now - left_at < FORGET_S for left_at in offered)

    def scenario_of(self, model: str, now: float) -> str:
        """The scenario of a request that names this model but no scenario.

        It is `default` if the model is served in `default`. Otherwise it is the first scenario by
        name that serves the model.
        """
        if (served := self._served.get(model)) is not None:
            return served
        seen = self._seen.get(model, _NOWHERE)
        known = (s for s, left_at in seen.items() if now - left_at < FORGET_S)
        return min(known, key=_plain_first, default=_ALL) or DEFAULT_SCENARIO

    def _is_known(self, model: str, now: float) -> bool:
        seen = self._seen.get(model)
        return seen is not None and now - max(seen.values()) < FORGET_S

    def check_invariants(self) -> None:
        assert set(self._since) == set(self._seen)
        assert all(self._seen.values())
        assert set(self._served) == {m for m, seen in self._seen.items() if _NOW in seen.values()}
        assert self._is_steady() or not self._defaults
        assert all(self._first_of(each, 0.0) == m for each, m in self._defaults.items())


def _plain_first(scenario: str) -> tuple[bool, str]:
    return scenario not in (_ALL, DEFAULT_SCENARIO), scenario


_NOW: Final = float("inf")
_ALL: Final = ""
_NOWHERE: Final[Mapping[str, float]] = MappingProxyType({})
