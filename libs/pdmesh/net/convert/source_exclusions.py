"""Converts the KV sources that a decode excludes, between its record and the core's types."""

from __future__ import annotations

from typing import Final

from pdmesh.core.kv.transfer.source_exclusions import ExcludedSource, KvSource, SourceFault
from pdmesh.v1.common_pb2 import (
    KV_FAULT_CORRUPT,
    KV_FAULT_SLOW,
    KV_FAULT_UNREACHABLE,
    ExcludedKvSource,
    InstanceRecord,
    PeerRef,
)

_TO_PROTO: Final = {
    SourceFault.CORRUPT: KV_FAULT_CORRUPT,
    SourceFault.UNREACHABLE: KV_FAULT_UNREACHABLE,
    SourceFault.SLOW: KV_FAULT_SLOW,
}
_FROM_PROTO: Final = {number: fault for fault, number in _TO_PROTO.items()}


def excluded_to_proto(excluded: ExcludedSource) -> ExcludedKvSource:
    source = PeerRef(
        instance_id=excluded.source.instance_id, incarnation=excluded.source.incarnation
    )
    return ExcludedKvSource(source=source, fault=_TO_PROTO[excluded.fault])


def excluded_from(record: InstanceRecord) -> tuple[ExcludedSource, ...]:
    """The exclusions in a record, without those for a fault that this release does not know.

    The decode itself applies all exclusions.
    """
    return tuple(
        ExcludedSource(KvSource(h.source.instance_id, h.source.incarnation), fault)
        for h in record.excluded_kv_sources
        if (fault := _FROM_PROTO.get(h.fault)) is not None
    )
