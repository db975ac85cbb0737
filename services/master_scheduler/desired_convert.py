"""Between the adjustments of the desired state as they are stored and as the core works with them."""

from __future__ import annotations

from collections.abc import Mapping

from pdmesh.core.adjustments import Adjustment, Adjustments
from pdmesh.v1 import admin_service_pb2 as pb


def adjustments_from(message: pb.Adjustments) -> dict[str, Adjustment]:
    return {
        each.group_id: Adjustment(
            each.num_prefill,
            each.num_decode,
            (each.base_num_prefill, each.base_num_decode),
            each.pool,
            each.reason,
        )
        for each in message.groups
    }


def adjustments_to(
    adjustments: Adjustments, fired: Mapping[str, float], epoch: int
) -> pb.Adjustments:
    return pb.Adjustments(
        epoch=epoch,
        fired=dict(fired),
        groups=[
            pb.GroupAdjustment(
                group_id=group_id,
                num_prefill=each.prefill,
                num_decode=each.decode,
                pool=each.pool,
                base_num_prefill=each.base[0],
                base_num_decode=each.base[1],
                reason=each.reason,
            )
            for group_id, each in sorted(adjustments.items())
        ],
    )
