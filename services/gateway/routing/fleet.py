"""The gateway's view of the instances and masters, from its own copy of the registry.

The registry, which NATS stores, has the records of all live processes. While NATS is unreachable,
the last view stays valid, because the instances may still be alive (F18). A scenario is a kind of
requests with its own instances. A plan names the instances that may serve a request. A pooling
model makes vectors or scores of texts. An encoder is an instance that makes the embeddings of
images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.health.gateway_readiness import probed_paths
from pdmesh.core.images.prompt_image import ImageFacts
from pdmesh.core.kv.transfer.source_exclusions import NO_EXCLUSIONS, KvExchange
from pdmesh.core.model import Role
from pdmesh.core.placement.gateway_ranking import (
    GatewayEndpoint,
    GatewayQuery,
    GatewayRanking,
)
from pdmesh.core.placement.local_ranking import LocalInstance, LocalQuery, LocalRanking
from pdmesh.core.placement.plan import DEFAULT_MODEL, DEFAULT_SCENARIO
from pdmesh.core.request.events import Candidate
from pdmesh.errors import InvalidRequest, ModelNotFound, NoInstance, shortened
from pdmesh.net.addresses import is_numeric
from pdmesh.net.convert.source_exclusions import excluded_from
from pdmesh.net.registry import RecordChanged, RegistryView, takes_requests
from pdmesh.services.gateway.routing.adapter_names import AdaptedModel, AdapterNames
from pdmesh.services.gateway.routing.canary_shares import CanaryShares
from pdmesh.services.gateway.routing.out_of_service import OutOfServiceView
from pdmesh.services.gateway.routing.pooling_fleet import PoolingFleet
from pdmesh.services.gateway.routing.served_models import ServedModels
from pdmesh.v1.common_pb2 import (
    ROLE_DECODE,
    ROLE_ENCODER,
    ROLE_FUSION,
    ROLE_POOLING,
    ROLE_PREFILL,
    InstanceRecord,
    ModelText,
)

_ROLES: Final = {
    ROLE_PREFILL: Role.PREFILL,
    ROLE_DECODE: Role.DECODE,
    ROLE_FUSION: Role.FUSION,
}
_MASTER: Final = "master-scheduler"
_GATEWAY: Final = "gateway"


def pair_of(record: InstanceRecord) -> str:
    """A key that instances share if they may hand KV to each other (S13).

    The key differs between revisions of a model (S24) and between regions (S58).
    """
    return f"{record.group_id}/{record.model_fingerprint}/{record.revision}/{record.kv_region}"


def _encodes_for(record: InstanceRecord) -> tuple[str, str, str, str]:
    """A key that an encoder shares with the instances for which it encodes images.

    Unlike the key of `pair_of`, this key has no fingerprint, because an encoder has no KV.
    """
    return record.group_id, record.revision, record.kv_region, record.model


def _local(record: InstanceRecord) -> LocalInstance:
    return LocalInstance(
        record.instance_id,
        record.incarnation,
        _ROLES[record.role],
        record.model,
        record.scenario,
        record.group_id,
        pair_of(record),
        record.kv_region,
        record.max_adapters > 0,
        frozenset(record.loaded_adapters),
        record.HasField("images"),
    )


def _takes_calls(record: InstanceRecord) -> bool:
    """Whether this is a gateway that proxies can send requests to. They need a numeric address."""
    is_gateway = record.service == _GATEWAY and not record.is_draining
    return is_gateway and is_numeric(record.http_address)


def _endpoint(record: InstanceRecord) -> GatewayEndpoint:
    return GatewayEndpoint(record.instance_id, record.http_address, record.region)


def gateway_name(instance_id: str, incarnation: int) -> str:
    """The name of one incarnation of a gateway."""
    return f"{instance_id}/{incarnation}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an instance must have to serve a request.

    The instance must have the request's model. If the request wants an adapter, the instance must
    have slots for adapters. If the request has images, the instance must take images.

    The instance must also have the vocabulary of the request's tokens. This is checked only if both
    vocabularies are known: `vocabulary` is empty if the tokenizer came from the gateway's own
    folder, and an instance may report no vocabulary.
    """

    model: str
    vocabulary: str = ""
    adapter: str = ""
    has_images: bool = False

    def is_served_by(self, record: InstanceRecord) -> bool:
        if self.adapter and not record.max_adapters:
            return False
        if self.has_images and not record.HasField("images"):
            return False
        theirs = record.text.vocabulary
        is_readable = not (self.vocabulary and theirs) or self.vocabulary == theirs
        return record.model == self.model and is_readable


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model or LoRA adapter in the list that clients get.

    `age_s` is the time since this gateway first saw the model. For an adapter, `parent` is the
    model that the adapter changes.
    """

    name: str
    age_s: float
    max_model_len: int
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class MeshView:
    """What a gateway knows about the mesh from NATS."""

    records: RegistryView
    out_of_service: OutOfServiceView = field(default_factory=OutOfServiceView)
    canaries: CanaryShares = field(default_factory=CanaryShares)
    adapters: AdapterNames = field(default_factory=AdapterNames)


@dataclass(frozen=True, slots=True)
class _Unfit:
    """The instances that cannot serve a request.

    Each instance is checked only when its id is looked up, because a large mesh has thousands of
    instances and a ranking usually looks at few of them.
    """

    records: Mapping[str, InstanceRecord]
    wanted: Wanted
    excluded: frozenset[str]
    board: OutOfServiceView

    def __contains__(self, instance_id: object) -> bool:
        record = self.records.get(str(instance_id))
        if record is None or instance_id in self.excluded or self.board.is_out(record.instance_id):
            return True
        return not self.wanted.is_served_by(record)


@dataclass(frozen=True, slots=True)
class _Avoided:
    """The instances that get a request only if no other instance can take it."""

    records: Mapping[str, InstanceRecord]
    board: OutOfServiceView

    def __contains__(self, instance_id: object) -> bool:
        record = self.records.get(str(instance_id))
        return record is not None and self.board.is_avoided(record.instance_id, record.incarnation)


class FleetView:
    """The instances and masters, as this gateway sees them.

    `model` is the model that clients mean by the name `default`. If it is empty, `default` means
    the model of the request's scenario. `region` and `gateway_id` describe this gateway.
    """

    def __init__(
        self,
        mesh: MeshView,
        model: str,
        clock: Callable[[], float],
        region: str = "",
        gateway_id: str = "",
    ) -> None:
        self.region = region
        self._ranking = LocalRanking(region, gateway_id)
        self._gateways = GatewayRanking()
        self._mesh, self._view = mesh, mesh.records
        self._clock = clock
        self._served = ServedModels(model)
        self.pooling = PoolingFleet(
            mesh.out_of_service, mesh.canaries, self._served, clock, region, gateway_id
        )
        self._connected_at = clock()
        self._records: dict[str, InstanceRecord] = {}
        self._refresh()
        self._view.on_change(self._on_change)

    def _on_change(self, change: RecordChanged) -> None:
        self._refresh()

    def _refresh(self) -> None:
        self._records = dict(self._view.records)
        self._prefills = self._with_role(ROLE_PREFILL)
        self._decodes = self._with_role(ROLE_DECODE)
        self._fusions = self._with_role(ROLE_FUSION)
        self._masters = [r for _, r in sorted(self._records.items()) if r.service == _MASTER]
        self._exchange = KvExchange.of(
            {r.instance_id: excluded_from(r) for r in self._decodes if r.excluded_kv_sources},
            {i: r.incarnation for i, r in self._records.items()},
        )
        serving = (*self._prefills, *self._decodes, *self._fusions)
        self._ranking.see(_local(r) for r in serving if not r.is_draining)
        self._gateways.see(_endpoint(r) for r in self._records.values() if _takes_calls(r))
        self._served.see((*self._prefills, *self._fusions, *self._decodes), self._clock())
        self.pooling.see(self._with_role(ROLE_POOLING))
        self._encoders = [r for r in self._with_role(ROLE_ENCODER) if not r.is_draining]

    def _with_role(self, role: int) -> list[InstanceRecord]:
        found = (r for _, r in sorted(self._records.items()) if r.role == role)
        return [r for r in found if takes_requests(r)]

    def record(self, instance_id: str, incarnation: int) -> InstanceRecord | None:
        found = self._records.get(instance_id)
        return found if found is not None and found.incarnation == incarnation else None

    def instance(self, instance_id: str) -> InstanceRecord | None:
        """The record of the instance's present incarnation."""
        return self._records.get(instance_id)

    def encoders(self, record: InstanceRecord) -> list[InstanceRecord]:
        """The encoders that may encode images for this prefill or fusion."""
        if not (self._encoders and record.fetches_embeddings):
            return []
        cell, out = _encodes_for(record), self._mesh.out_of_service
        avoided = {(r.instance_id, r.incarnation) for r in record.avoided_encoders}
        return [
            r
            for r in self._encoders
            if _encodes_for(r) == cell
            and (r.instance_id, r.incarnation) not in avoided
            and not out.is_out(r.instance_id)
            and not out.is_avoided(r.instance_id, r.incarnation)
        ]

    def masters(self) -> Sequence[InstanceRecord]:
        return self._masters

    def gateways(self) -> frozenset[str]:
        """The names of all registered gateways, including this one."""
        found = (r for r in self._records.values() if r.service == _GATEWAY)
        return frozenset(gateway_name(r.instance_id, r.incarnation) for r in found)

    def gateway_endpoints(
        self, query: GatewayQuery, num_open: Callable[[str], int]
    ) -> Sequence[GatewayEndpoint]:
        """The gateways that a proxy can send a request to, in the order of `GatewayRanking`."""
        return self._gateways.rank(query, num_open)

    def region_of(self, instance_id: str) -> str:
        record = self._records.get(instance_id)
        return "" if record is None else record.region

    def staleness_s(self) -> float:
        """The seconds since a call of this method last found the gateway connected to NATS.

        Call it often, since the connection is checked only here.
        """
        now = self._clock()
        if self._view.is_connected:
            self._connected_at = now
        return now - self._connected_at

    # --- models ----------------------------------------------------------------------------------

    def models(self) -> list[KnownModel]:
        """The models and then the adapters that can be served now, each in the order of names."""
        out = self._mesh.out_of_service
        serving = (*self._prefills, *self._fusions, *self._decodes)
        able = {r.model for r in serving if not (r.is_draining or out.is_out(r.instance_id))}
        able |= self.pooling.models()
        names = [*sorted(able), *(n for n in self._mesh.adapters.names() if self._is_able(n, able))]
        return [entry for m in names if (entry := self.known_model(m)) is not None]

    def _is_able(self, name: str, able: set[str]) -> bool:
        found = self.adapted(name)
        return found is not None and found.model in able

    def adapted(self, name: str) -> AdaptedModel | None:
        """The adapter that a name stands for now. None for a model's name or an unknown name."""
        found = self._mesh.adapters.find(name)
        if found is None or self._served.catalogue.since(name) is not None:
            return None
        return found if self._served.catalogue.since(found.model) is not None else None

    def base_model(self, name: str) -> str:
        """The model that instances serve under this name."""
        found = self.adapted(name)
        return name if found is None else found.model

    def known_model(self, model: str) -> KnownModel | None:
        """The model as its instances describe it, or described it before they were lost.

        None if the model is unknown.
        """
        base = self.base_model(model)
        is_answering = self._served.catalogue.since(base) is not None
        served = self._served if is_answering else self.pooling.served
        since, reference = served.catalogue.since(base), served.reference(base)
        if since is None or reference is None:
            return None
        parent = None if base == model else base
        return KnownModel(model, self._clock() - since, reference.max_model_len, parent)

    def is_pooling_model(self, name: str) -> bool:
        """Whether a pooling model has this name, and no model that makes answers has it."""
        is_other = self._served.catalogue.since(name) is not None or self.adapted(name) is not None
        return self.pooling.has(name) and not is_other

    def model_name(self, asked: str, scenario: str = "") -> str:
        """The model or adapter that `asked` means.

        A model that has lost all instances stays known for a while. Raises ModelNotFound,
        NoInstance, and InvalidRequest for a pooling model.
        """
        found = self._served.catalogue.resolve(asked, scenario, self._clock())
        if found is not None:
            return found
        if self.adapted(asked) is not None:
            return asked
        if asked in {"", DEFAULT_MODEL}:
            raise NoInstance("no instance serves any model now")
        shown = repr(shortened(asked))
        if self.is_pooling_model(asked):
            message = f"the model {shown} is a pooling model: it makes no answers"
            raise InvalidRequest(message, reason="WRONG_TASK", field="model")
        raise ModelNotFound(f"the model {shown} does not exist", field="model")

    def text_of(self, model: str) -> ModelText | None:
        """See `ServedModels.text_of`."""
        return self._served.text_of(model)

    def text_sources(self, model: str) -> list[InstanceRecord]:
        """The instances with the files that `text_of` returns."""
        return self._served.text_sources(model)

    def served_texts(self) -> list[tuple[str, str]]:
        """The models that have instances, by name, each with the digest of its tokenizer files."""
        return self._served.texts()

    def reference(self, model: str) -> InstanceRecord | None:
        """An instance that represents the model, for example for context length and block size.

        If the model has no instances now, this is the last one that was seen.
        """
        found = self._served.reference(model)
        return found if found is not None else self._served.reference(self.base_model(model))

    def unsupported_shaping(self, model: str) -> frozenset[str]:
        """The fields of `LogitShaping` that not every instance of the model supports."""
        return self._served.unsupported_shaping(self.base_model(model))

    def supports_constraints(self, model: str) -> bool:
        """See `ServedModels.supports_constraints`."""
        return self._served.supports_constraints(self.base_model(model))

    def images_of(self, model: str) -> ImageFacts | None:
        """See `ServedModels.images_of`."""
        return self._served.images_of(self.base_model(model))

    def has_served(self, model: str, scenario: str) -> bool:
        """Whether an instance serves the model for this scenario, or did so recently."""
        return self._served.catalogue.knows(model, scenario, self._clock())

    def is_served_elsewhere(self, model: str, scenario: str) -> bool:
        """Whether the model is served now, but for this scenario neither now nor recently."""
        return bool(self._served.serving(model)) and not self.has_served(model, scenario)

    def scenario_of(self, model: str) -> str:
        """The scenario of a request that names this model and no scenario."""
        return self._served.catalogue.scenario_of(model, self._clock())

    def can_serve(self) -> bool:
        """Whether there is an instance that makes answers, vectors or scores."""
        return self.serves_answers() or not self.pooling.is_empty

    def serves_answers(self) -> bool:
        """Whether answers can be made. If one role has no instance, the other role suffices."""
        return bool(self._fusions or self._prefills or self._decodes)

    def paths(self) -> list[tuple[InstanceRecord, InstanceRecord | None]]:
        """The paths to probe, in the order of `core.health.gateway_readiness`.

        A path is a prefill and a decode. The second is None if the first does both phases.
        """
        prefills, decodes, fusions = (
            {r.instance_id: pair_of(r) for r in records if not r.is_draining}
            for records in (self._prefills, self._decodes, self._fusions)
        )
        records = self._records
        found = probed_paths(prefills, decodes, list(fusions))
        return [(records[first], records[second] if second else None) for first, second in found]

    # --- candidates ------------------------------------------------------------------------------

    def candidate(
        self,
        instance_id: str,
        incarnation: int,
        wanted: Wanted,
        num_matched_tokens: int = 0,
        *,
        is_local: bool = False,
    ) -> Candidate | None:
        """The instance that a plan names, as a candidate for a request.

        None if this incarnation is gone, is out of service or cannot serve the request. So a late
        plan never reaches a later incarnation of the instance.
        """
        record = self.record(instance_id, incarnation)
        if record is None or record.role not in _ROLES or not takes_requests(record):
            return None
        if not wanted.is_served_by(record):
            return None
        if self._mesh.out_of_service.is_out(instance_id):
            return None
        is_local = is_local or record.role == ROLE_FUSION
        exclusions = self._exchange.exclusions(instance_id) if self._exchange else NO_EXCLUSIONS
        return Candidate(
            instance_id, incarnation, pair_of(record), is_local, num_matched_tokens, exclusions
        )

    def least_loaded(
        self,
        wanted: Wanted,
        scenario: str,
        excluded: Sequence[str],
        num_open: Callable[[str, int], int],
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Prefills (or fusions) and decodes, in the order of `core.placement.local_ranking`."""
        canary = self._mesh.canaries.draw(scenario or DEFAULT_SCENARIO)
        board = self._mesh.out_of_service
        query = LocalQuery(
            wanted.model,
            scenario,
            _Unfit(self._records, wanted, frozenset(excluded), board),
            _Avoided(self._records, board),
            canary,
            wanted.adapter,
            wanted.has_images,
        )
        plan = self._ranking.rank(query, num_open)
        return (
            self._candidates(plan.prefills, wanted, is_local=plan.is_colocated),
            self._candidates(plan.decodes, wanted),
        )

    def _candidates(
        self, ranked: Sequence[LocalInstance], wanted: Wanted, *, is_local: bool = False
    ) -> list[Candidate]:
        found = (self.candidate(i.id, i.incarnation, wanted, is_local=is_local) for i in ranked)
        return [candidate for candidate in found if candidate is not None]
