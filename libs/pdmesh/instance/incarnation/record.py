"""Builds an instance's registry record: its role, its phase, and what its engine can do."""

from __future__ import annotations

import os

from pdmesh import __version__
from pdmesh.core.instance.lifecycle import InstanceLife
from pdmesh.core.model import PeerId, Phase, Role, RoleSpec
from pdmesh.instance.incarnation.assignment import TO_PROTO, domain_to
from pdmesh.instance.incarnation.role_settings import tiers_of
from pdmesh.instance.incarnation.self_restart import device_names
from pdmesh.instance.incarnation.serving import Serving
from pdmesh.instance.settings import InstanceSettings
from pdmesh.net.convert.image_facts import images_to_proto
from pdmesh.net.convert.pooling_facts import pooling_to_proto
from pdmesh.net.convert.source_exclusions import excluded_to_proto
from pdmesh.net.registry import takes_requests
from pdmesh.service_process import App
from pdmesh.text_files import TextFiles
from pdmesh.v1.common_pb2 import InstancePhase, InstanceRecord, ModelText, PeerRef

_NO_ROLE = RoleSpec(Role.NONE, "", "")


def record_of(
    life: InstanceLife,
    app: App,
    settings: InstanceSettings,
    serving: Serving | None,
    is_stopping: bool,
    domain_address: str = "",
) -> InstanceRecord:
    """Build the record.

    `is_stopping` is true once the process was asked to stop. A serving instance then drains,
    whatever its assignment says. Only a blank instance has a `domain_address`. If the instance
    becomes rank 0 of a data-parallel domain, the other ranks connect to this address.
    """
    role_spec = life.role_spec or _NO_ROLE
    phase = Phase.DRAINING if is_stopping and serving is not None else life.phase
    record = InstanceRecord(
        instance_id=app.instance_id,
        incarnation=app.incarnation,
        service=app.service,
        role=TO_PROTO[role_spec.role],
        group_id=role_spec.group_id,
        scenario=role_spec.scenario,
        revision=role_spec.revision,
        phase=InstancePhase.ValueType(phase),
        is_draining=phase in (Phase.DRAINING, Phase.DRAINED),
        assignment_id=life.assignment.assignment_id if life.assignment is not None else 0,
        epoch=life.epoch,
        failure=life.failure,
        verified_peers=map(_ref, life.verified_peers),
        failed_peers=map(_ref, life.failed_peers),
        engine=settings.engine,
        region=settings.region,
        rack=settings.rack,
        kv_region="" if role_spec.spans_regions else settings.region,
        ops_address=app.ops_address,
        version=__version__,
        pid=os.getpid(),
        node_id=settings.node,
        devices=device_names(settings.devices, app.instance_id, os.environ),
        domain=domain_to(role_spec.domain) if role_spec.domain is not None else None,
        domain_address=domain_address,
    )
    if serving is not None:
        _describe(record, serving)
    return record


def _describe(record: InstanceRecord, serving: Serving) -> None:
    loaded, info = serving.loaded, serving.loaded.info
    record.grpc_address = serving.address
    record.kv_addresses.extend(info.kv_addresses)
    record.model, record.model_fingerprint = info.model, info.model_fingerprint
    record.block_size, record.num_kv_blocks = info.block_size, info.num_kv_blocks
    record.num_slots = serving.host.admission.num_places  # the same number as in its load reports
    record.kv_bytes_per_token = info.kv_bytes_per_token
    record.max_model_len, record.supports_logprobs = info.max_model_len, info.supports_logprobs
    record.kv_path = info.kv_path
    record.supports_constraints = info.supports_constraints
    record.unsupported_shaping.extend(info.unsupported_shaping)
    if (text := loaded.text.files) is not None:
        record.text.CopyFrom(_text(text))
    record.max_adapters = info.max_adapters
    record.loaded_adapters.extend(serving.host.loaded_adapters)
    record.fetches_from_peers = tiers_of(loaded.settings).fetches_from_peers
    record.takes_prefetches = record.fetches_from_peers
    record.takes_session_hints = tiers_of(loaded.settings).has_host_pool
    if info.images is not None:
        record.images.CopyFrom(images_to_proto(info.images))
    record.fetches_embeddings = info.fetches_embeddings
    record.avoided_encoders.extend(map(_ref, serving.host.avoided_encoders))
    if info.pooling is not None:
        record.pooling.CopyFrom(pooling_to_proto(info.pooling))
    record.load_timings.CopyFrom(loaded.timings.to_proto())
    record.excluded_kv_sources.extend(map(excluded_to_proto, serving.host.excluded_sources()))
    if takes_requests(record):  # the host also drains without an order, if the engine died
        record.is_draining = serving.host.admission.is_draining


def _text(text: TextFiles) -> ModelText:
    return ModelText(digest=text.digest, vocabulary=text.vocabulary, num_bytes=text.num_bytes)


def _ref(peer: PeerId) -> PeerRef:
    return PeerRef(instance_id=peer.instance_id, incarnation=peer.incarnation)
