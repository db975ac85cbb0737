"""The senders that a decode holds in quarantine, between its record and `source_exclusions`."""

from __future__ import annotations

from typing import Final

from pdmesh.core.kv.transfer.source_exclusions import HeldSource, KvSource, SourceFault
from pdmesh.v1.common_pb2 import (
    KV_FAULT_CORRUPT,
    KV_FAULT_SLOW,
    KV_FAULT_UNREACHABLE,
    HeldKvSource,
    InstanceRecord,
    PeerRef,
)

_TO_PROTO: Final = {
    SourceFault.CORRUPT: KV_FAULT_CORRUPT,
    SourceFault.UNREACHABLE: KV_FAULT_UNREACHABLE,
    SourceFault.SLOW: KV_FAULT_SLOW,
}
_FROM_PROTO: Final = {number: fault for fault, number in _TO_PROTO.items()}


def held_to_proto(held: HeldSource) -> HeldKvSource:
    source = PeerRef(instance_id=held.source.instance_id, incarnation=held.source.incarnation)
    return HeldKvSource(source=source, fault=_TO_PROTO[held.fault])


def held_from(record: InstanceRecord) -> tuple[HeldSource, ...]:
    """An unknown fault counts as none: the decode itself refuses what it must."""
    return tuple(
        HeldSource(KvSource(h.source.instance_id, h.source.incarnation), fault)
        for h in record.held_kv_sources
        if (fault := _FROM_PROTO.get(h.fault)) is not None
    )
