"""The KV transfers of the last minute, summed by pair of instances."""

from __future__ import annotations

from pdmesh.core.history.ended_request import EndedRequest
from pdmesh.core.history.kv_flows import WINDOW_S, Flow, KvFlows


def handed(prefill: str, decode: str, outcome: str = "completed", ms: float = 4.0) -> EndedRequest:
    return EndedRequest(
        "r",
        "chat",
        outcome,
        prefill_id=prefill,
        decode_id=decode,
        num_prompt_tokens=100,
        kv_transfer_ms=ms,
    )


def test_flows_are_summed_by_pair_over_the_window_and_then_forgotten() -> None:
    flows = KvFlows()
    flows.handle(handed("p-0", "d-1"), 0.0)
    flows.handle(handed("p-0", "d-1", ms=6.0), 20.0)
    flows.handle(handed("p-1", "d-0"), 20.0)
    assert flows.flows(21.0) == {
        ("p-0", "d-1"): Flow(2, 200, 10.0),
        ("p-1", "d-0"): Flow(1, 100, 4.0),
    }
    assert flows.flows(5.0 + WINDOW_S)[("p-0", "d-1")].num_requests == 1
    assert flows.flows(26.0 + WINDOW_S) == {}


def test_a_request_that_failed_or_had_one_instance_is_no_flow() -> None:
    flows = KvFlows()
    flows.handle(handed("p-0", "d-0", "failed"), 0.0)
    flows.handle(handed("f-0", ""), 0.0)
    assert flows.flows(1.0) == {}
