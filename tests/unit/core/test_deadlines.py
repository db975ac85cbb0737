"""The deadlines of the mesh have a fixed order. Every default comes from one table."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest

from pdmesh.core import deadlines as d
from pdmesh.core.request.events import RequestLimits
from pdmesh.engine.sim.config import SimConfig
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.instance.legs.host import HostConfig
from pdmesh.instance.legs.leg_life import PullLimits
from pdmesh.instance.settings import InstanceSettings
from pdmesh.services.gateway.settings import Settings as GatewaySettings


@pytest.mark.fault("F8", "F23")
def test_the_side_that_knows_most_about_a_fault_reports_it_first() -> None:
    pull = d.TRANSFER_TIMEOUT_S
    nested = (
        d.SILENT_S,  # the receiver lets other pulls use the link
        d.TRANSFER_STALL_S,  # the receiver fails a pull on a cut link
        d.TRANSFER_STALL_S + d.STOP_S,  # the receiver aborts the connection
        pull,  # the receiver fails a slow pull
        pull + d.PULL_GRACE_S,  # the host fails a leg whose worker reports nothing
        d.LEG_STALL_S,  # the gateway gives up the leg
        d.ENGINE_HUNG_S,  # the instance ends itself
    )
    assert all(before < after for before, after in pairwise(nested))


def test_a_prefill_that_awaits_embeddings_goes_on_before_its_gateway_leaves() -> None:
    assert d.ENCODE_WAIT_S + d.PROGRESS_EVERY_S < d.LEG_STALL_S


def test_a_sender_keeps_the_bytes_for_as_long_as_a_receiver_may_want_them() -> None:
    waits = 2 * d.TRANSFER_TIMEOUT_S  # a pull waits for its turn, and then for its bytes
    assert waits + d.STOP_S < d.TICKET_LEASE_S
    assert d.TICKET_LEASE_S / d.RENEWALS_PER_LEASE < d.TRANSFER_TIMEOUT_S, (
        "the lease is renewed in both waits"
    )
    assert 10 * waits <= d.MAX_LEASES * d.TICKET_LEASE_S


def test_progress_is_reported_several_times_within_each_silence_bound() -> None:
    assert 3 * d.PROGRESS_EVERY_S < d.LEG_STALL_S
    assert d.HAD_KV_S < d.ANSWER_S < d.LEG_STALL_S
    assert d.LEG_STALL_S < d.OUTBOX_STALL_S, (
        "the gateway leaves silent legs before it is cut off for being slow"
    )


def default(kind: Any, name: str) -> object:
    """The default of a setting or of a dataclass field."""
    if issubclass(kind, InstanceSettings | GatewaySettings):
        return kind.model_fields[name].default
    return next(field.default for field in fields(kind) if field.name == name)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (GatewaySettings, "answer_s", d.ANSWER_S),
        (GatewaySettings, "stall_s", d.LEG_STALL_S),
        (RequestLimits, "answer_s", d.ANSWER_S),
        (RequestLimits, "stall_s", d.LEG_STALL_S),
        (InstanceSettings, "transfer_timeout_s", d.TRANSFER_TIMEOUT_S),
        (InstanceSettings, "transfer_stall_s", d.TRANSFER_STALL_S),
        (InstanceSettings, "stall_s", d.OUTBOX_STALL_S),
        (InstanceSettings, "ticket_lease_s", d.TICKET_LEASE_S),
        (InstanceSettings, "engine_hung_s", d.ENGINE_HUNG_S),
        (HostConfig, "stall_s", d.OUTBOX_STALL_S),
        (PullLimits, "timeout_s", d.TRANSFER_TIMEOUT_S),
        (PullLimits, "stall_s", d.TRANSFER_STALL_S),
        (SimConfig, "ticket_lease_s", d.TICKET_LEASE_S),
        (VllmConfig, "lease_s", d.TICKET_LEASE_S),
    ],
)
def test_every_default_comes_from_the_table(kind: type, name: str, value: float) -> None:
    assert default(kind, name) == value
