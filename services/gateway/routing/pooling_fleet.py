"""The pooling instances as this gateway sees them: their models, and which is asked first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from pdmesh.core.model import PeerId
from pdmesh.core.placement.plan import DEFAULT_MODEL
from pdmesh.core.pooling.facts import PoolingFacts
from pdmesh.core.pooling.ranking import PoolingInstance, PoolingQuery, ranked
from pdmesh.errors import InvalidRequest, ModelNotFound, NoInstance, shortened
from pdmesh.net.pooling_facts import pooling_from_proto
from pdmesh.services.gateway.routing.model_book import ModelBook
from pdmesh.services.gateway.routing.out_of_service import OutOfServiceView
from pdmesh.v1.common_pb2 import InstanceRecord


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """A model of pooling instances, as its record tells."""

    name: str
    facts: PoolingFacts
    fingerprint: str
    max_model_len: int


class PoolingFleet:
    """`answers`: the models that make answers, which other paths serve."""

    def __init__(
        self,
        out_of_service: OutOfServiceView,
        answers: ModelBook,
        clock: Callable[[], float],
        region: str = "",
        gateway_id: str = "",
    ) -> None:
        self.book = ModelBook()
        self._out, self._answers, self._clock = out_of_service, answers, clock
        self._region, self._gateway_id = region, gateway_id
        self._records: list[InstanceRecord] = []
        self._ties: dict[str, bytes] = {}

    def see(self, records: Iterable[InstanceRecord]) -> None:
        """All pooling instances that take requests now."""
        self._records = list(records)
        self.book.see(self._records, self._clock())
        self._ties = {r.instance_id: self._tie(r.instance_id) for r in self._records}

    @property
    def is_empty(self) -> bool:
        return not self._records

    def models(self) -> set[str]:
        """The pooling models that can be served now."""
        out = self._out
        return {r.model for r in self._records if not (r.is_draining or out.is_out(r.instance_id))}

    def has(self, asked: str) -> bool:
        """Whether a model has this name, or had it lately."""
        return self.book.catalogue.since(asked) is not None

    def model(self, asked: str, scenario: str = "") -> PoolingModel:
        """Raises InvalidRequest for a model that makes answers, ModelNotFound, NoInstance."""
        name = self.book.catalogue.resolve(asked, scenario, self._clock())
        record = self.book.reference(name) if name is not None else None
        if name is None or record is None:
            raise self._unknown(asked)
        facts = pooling_from_proto(record.pooling)
        return PoolingModel(name, facts, record.model_fingerprint, record.max_model_len)

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
        return self.book.catalogue.scenario_of(model, self._clock())

    def is_served_elsewhere(self, model: str, scenario: str) -> bool:
        """Whether instances serve the model, but none does or lately did for this scenario."""
        knows = self.book.catalogue.knows(model, scenario, self._clock())
        return bool(self.book.serving(model)) and not knows

    def ranked(
        self,
        model: str,
        scenario: str,
        vocabulary: str,
        excluded: Collection[PeerId],
        num_open: Callable[[str, int], int],
    ) -> list[PeerId]:
        """The candidates, best first. `vocabulary`: that of the tokens; empty: not known.

        `num_open`: counts this gateway's own legs on an instance.
        """
        out = self._out
        instances = [
            PoolingInstance(
                PeerId(r.instance_id, r.incarnation),
                r.model,
                r.scenario,
                r.region,
                r.num_slots,
                num_open(r.instance_id, r.incarnation),
                self._ties[r.instance_id],
            )
            for r in self.book.serving(model)
            if not r.is_draining
            and not out.is_out(r.instance_id)
            and (not (vocabulary and r.text.vocabulary) or vocabulary == r.text.vocabulary)
        ]
        avoided = [
            i.id.instance_id
            for i in instances
            if out.is_avoided(i.id.instance_id, i.id.incarnation)
        ]
        return ranked(instances, PoolingQuery(model, scenario, self._region, excluded, avoided))

    def _tie(self, instance_id: str) -> bytes:
        """A fixed order of this gateway, so that not all gateways begin with the same instance."""
        key = self._gateway_id.encode()[:64]
        return hashlib.blake2b(instance_id.encode(), key=key, digest_size=8).digest()
