"""The gateway's view of the pooling instances, which make vectors or scores of texts.

It knows their models, and decides in which order the instances are asked. A scenario is a kind of
requests with its own instances. A canary is an extra group of instances, which gets a new revision
of a model first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from pdmesh.core.model import PeerId
from pdmesh.core.placement.plan import DEFAULT_MODEL, DEFAULT_SCENARIO
from pdmesh.core.pooling.facts import PoolingFacts
from pdmesh.core.pooling.ranking import PoolingInstance, PoolingQuery, ranked
from pdmesh.errors import InvalidRequest, ModelNotFound, NoInstance, shortened
from pdmesh.net.convert.pooling_facts import pooling_from_proto
from pdmesh.services.gateway.routing.canary_shares import CanaryShares
from pdmesh.services.gateway.routing.out_of_service import OutOfServiceView
from pdmesh.services.gateway.routing.served_models import ServedModels
from pdmesh.v1.common_pb2 import InstanceRecord


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """A model of pooling instances, as an instance's record describes it."""

    name: str
    facts: PoolingFacts
    fingerprint: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class PoolingNeeds:
    """What the instances of one call must have.

    `vocabulary` identifies the vocabulary of the call's tokens, and is empty if it is not known.
    `canary` is the id of the canary's group, and whether this call goes there (see `PoolingQuery`).
    """

    model: PoolingModel
    scenario: str
    vocabulary: str = ""
    canary: tuple[str, bool] | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    """The facts of an instance's record that each batch needs, converted once."""

    instance: PoolingInstance
    facts: PoolingFacts
    vocabulary: str


class PoolingFleet:
    """The pooling instances and their models.

    `answers` has the models that generate answers. If a request for vectors or scores names one of
    them, the error says so.
    """

    def __init__(
        self,
        out_of_service: OutOfServiceView,
        canaries: CanaryShares,
        answers: ServedModels,
        clock: Callable[[], float],
        region: str = "",
        gateway_id: str = "",
    ) -> None:
        self.served = ServedModels()
        self._out, self._canaries = out_of_service, canaries
        self._answers, self._clock = answers, clock
        self._region, self._gateway_id = region, gateway_id
        self._records: list[InstanceRecord] = []
        self._instances: dict[PeerId, _Known] = {}

    def see(self, records: Iterable[InstanceRecord]) -> None:
        """Take over the records of all pooling instances that take requests now."""
        self._records = list(records)
        self.served.see(self._records, self._clock())
        known = [self._known(r) for r in self._records if not r.is_draining]
        self._instances = {each.instance.id: each for each in known}

    @property
    def is_empty(self) -> bool:
        return not self._records

    def models(self) -> set[str]:
        """The pooling models that can be served now."""
        out = self._out
        return {r.model for r in self._records if not (r.is_draining or out.is_out(r.instance_id))}

    def has(self, asked: str) -> bool:
        """Whether a pooling model has this name, or had it recently."""
        return self.served.catalogue.since(asked) is not None

    def model(
        self, asked: str, scenario: str = "", fits: Callable[[PoolingFacts], bool] = bool
    ) -> PoolingModel:
        """The model that `asked` means.

        The name `default` means a model for which `fits` is true, or any model if there is none.
        Raises ModelNotFound, NoInstance, and InvalidRequest for a model that generates answers.
        """
        name = self._default(asked, scenario, fits)
        if name is None:
            name = self.served.catalogue.resolve(asked, scenario, self._clock())
        record = self.served.reference(name) if name is not None else None
        if name is None or record is None:
            raise self._unknown(asked)
        facts = pooling_from_proto(record.pooling)
        return PoolingModel(name, facts, record.model_fingerprint, record.max_model_len)

    def _default(
        self, asked: str, scenario: str, fits: Callable[[PoolingFacts], bool]
    ) -> str | None:
        """The model that `default` means.

        None if `asked` is another name, or if no model fits. Models of the scenario are preferred.
        Of several, the first one by name is chosen.
        """
        if asked not in ("", DEFAULT_MODEL) or self.has(asked):
            return None
        known = {r.model: r for r in self._records if r.model}
        able = [name for name, r in known.items() if fits(pooling_from_proto(r.pooling))]
        now, catalogue = self._clock(), self.served.catalogue
        return min(able, key=lambda m: (not catalogue.knows(m, scenario, now), m), default=None)

    def _unknown(self, asked: str) -> Exception:
        if asked in ("", DEFAULT_MODEL):
            return NoInstance("no instance serves a pooling model now")
        shown = repr(shortened(asked))
        if self._answers.catalogue.since(asked) is not None:
            message = f"the model {shown} makes answers: it is no pooling model"
            return InvalidRequest(message, reason="WRONG_TASK", field="model")
        return ModelNotFound(f"the model {shown} does not exist", field="model")

    def scenario_of(self, model: str) -> str:
        """The scenario of a request that names this model and no scenario."""
        return self.served.catalogue.scenario_of(model, self._clock())

    def is_served_elsewhere(self, model: str, scenario: str) -> bool:
        """Whether the model is served now, but for this scenario neither now nor recently."""
        knows = self.served.catalogue.knows(model, scenario, self._clock())
        return bool(self.served.serving(model)) and not knows

    def pinned(self, needs: PoolingNeeds, num_open: Callable[[str, int], int]) -> PoolingNeeds:
        """Bind the needs to one revision of the model, so that it serves all inputs of a call.

        This is the revision of the instance that would be asked first. If a canary gets this call,
        this instance is one of the canary's.
        """
        needs = replace(needs, canary=self._canaries.draw(needs.scenario or DEFAULT_SCENARIO))
        first = next(iter(self._ranked(needs, None, (), num_open)), None)
        if first is None:
            return needs
        fingerprint = self._instances[first].instance.fingerprint
        return replace(needs, model=replace(needs.model, fingerprint=fingerprint))

    def is_gone(self, needs: PoolingNeeds) -> bool:
        """Whether only other revisions of the model are served now."""
        found = {each.instance.fingerprint for each in self._able(needs)}
        return bool(found) and needs.model.fingerprint not in found

    def ranked(
        self,
        needs: PoolingNeeds,
        excluded: Collection[PeerId],
        num_open: Callable[[str, int], int],
    ) -> list[PeerId]:
        """The instances to ask, best first.

        `num_open` counts the gateway's requests on an instance.
        """
        return self._ranked(needs, needs.model.fingerprint, excluded, num_open)

    def _ranked(
        self,
        needs: PoolingNeeds,
        fingerprint: str | None,
        excluded: Collection[PeerId],
        num_open: Callable[[str, int], int],
    ) -> list[PeerId]:
        instances = [each.instance for each in self._able(needs)]
        avoided = {
            i.id.instance_id
            for i in instances
            if self._out.is_avoided(i.id.instance_id, i.id.incarnation)
        }
        query = PoolingQuery(
            needs.model.name,
            needs.scenario,
            self._region,
            excluded,
            avoided,
            fingerprint,
            needs.canary,
        )
        return ranked(instances, query, lambda peer: num_open(peer.instance_id, peer.incarnation))

    def _able(self, needs: PoolingNeeds) -> list[_Known]:
        """The instances of the call's model, in any revision, that may serve the call's scenario.

        They have the vocabulary and the kind of output that the call needs.
        """
        vocabulary, facts, name = needs.vocabulary, needs.model.facts, needs.model.name
        scenario = needs.scenario or DEFAULT_SCENARIO
        return [
            each
            for each in self._instances.values()
            if each.instance.model == name
            and (each.instance.scenario or scenario) == scenario
            and (not (vocabulary and each.vocabulary) or vocabulary == each.vocabulary)
            and each.facts == facts
            and not self._out.is_out(each.instance.id.instance_id)
        ]

    def _known(self, record: InstanceRecord) -> _Known:
        instance = PoolingInstance(
            PeerId(record.instance_id, record.incarnation),
            record.model,
            record.scenario,
            record.region,
            record.num_slots,
            self._tie(record.instance_id),
            record.model_fingerprint,
            record.group_id,
        )
        return _Known(instance, pooling_from_proto(record.pooling), record.text.vocabulary)

    def _tie(self, instance_id: str) -> bytes:
        """A key that orders equal instances differently at each gateway.

        Without this key, all gateways would begin with the same instance.
        """
        key = self._gateway_id.encode()[:64]
        return hashlib.blake2b(instance_id.encode(), key=key, digest_size=8).digest()
