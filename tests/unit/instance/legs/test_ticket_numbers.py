"""A decode refuses a ticket whose numbers do not fit its prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.instance.admission import Capacity, Work
from pdmesh.core.kv.layout.cache_groups import STATE_WINDOW
from pdmesh.core.kv.prefix.block_hash import tokens_to_bytes
from pdmesh.errors import InvalidRequest
from pdmesh.instance.legs.convert import parse
from pdmesh.v1 import common_pb2
from pdmesh.v1.instance_service_pb2 import Start

FINGERPRINT = "m.float32.unscaled.b4.ab.heads4"
CAPACITY = Capacity(
    works=frozenset({Work.DECODE}),
    num_slots=8,
    num_blocks=64,
    block_size=4,
    block_bytes=64,
    max_model_len=128,
    staging_bytes=0,
    landing_bytes=1 << 16,
    max_retrievals=8,
    model_fingerprint=FINGERPRINT,
    num_ranks=2,
)


def start(num_tokens: int, kv_bytes: int, num_ranks: int = 2) -> Start:
    ticket = common_pb2.Ticket(
        ticket_id="t",
        instance_id="prefill-0",
        incarnation=7,
        model_fingerprint=FINGERPRINT,
        num_tokens=num_tokens,
        kv_bytes=kv_bytes,
        addresses=[f"a{rank}" for rank in range(num_ranks)],
    )
    sampling = common_pb2.SamplingParams(max_tokens=4, top_p=1.0)
    return Start(prompt_token_ids=tokens_to_bytes(range(9)), sampling=sampling, ticket=ticket)


@pytest.mark.req("S57")
@pytest.mark.parametrize(("kv_bytes", "num_ranks"), [(3 * 64, 2), (3 * 128, 1), (3 * 32, 4)])
def test_a_ticket_of_this_prompt_is_taken_from_any_number_of_ranks(
    kv_bytes: int, num_ranks: int
) -> None:
    assert len(parse(start(9, kv_bytes, num_ranks), CAPACITY).prompt) == 9


@pytest.mark.req("S3")
@pytest.mark.parametrize("kv_bytes", [1, 2 * 32, 3 * 32 + 2 * 32, 2 * 3 * 32])
def test_layers_with_a_window_or_a_state_send_less_than_all_blocks(kv_bytes: int) -> None:
    """A layer with a state sends exactly one block."""
    capacity = replace(CAPACITY, windows=(0, STATE_WINDOW))
    assert len(parse(start(9, 3 * 32 + 32), capacity).prompt) == 9
    with pytest.raises(InvalidRequest, match="belongs to another prompt"):
        parse(start(9, kv_bytes), capacity)


@pytest.mark.parametrize(
    ("num_tokens", "kv_bytes", "num_ranks"),
    [(8, 3 * 64, 2), (9, 4 * 64, 2), (9, 3 * 128, 2), (9, 0, 2), (9, 1, 2), (9, 3 * 64, 3)],
)
def test_a_ticket_of_another_prompt_is_refused(
    num_tokens: int, kv_bytes: int, num_ranks: int
) -> None:
    with pytest.raises(InvalidRequest, match="belongs to another prompt") as refused:
        parse(start(num_tokens, kv_bytes, num_ranks), CAPACITY)
    assert refused.value.field == "ticket"
