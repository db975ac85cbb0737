"""A gateway's report about a request is turned into steps with times."""

from __future__ import annotations

from pdmesh.core.history.request_story import stages


def test_a_report_becomes_steps_at_their_times() -> None:
    report = {
        "operation": "chat", "model": "m", "num_prompt_tokens": 31, "queue_ms": 5.0,
        "prefill_id": "p-0", "ttft_ms": 60.0, "num_cached_tokens": 16, "kv_transfer_ms": 2.0,
        "decode_queue_ms": 1.0, "decode_id": "d-0", "e2e_ms": 200.0, "outcome": "completed",
        "num_completion_tokens": 9, "reason": "stop",
    }  # fmt: skip
    steps = list(stages(report, "gateway-0", 100.2))
    assert [(round(1000 * (step.at - 100.0)), step.what) for step in steps] == [
        (0, "accepted: chat of m, 31 prompt tokens"),
        (5, "p-0 took it"),
        (60, "first token; 16 tokens of the prompt came from a cache"),
        (61, "d-0 has the KV; it waited 1.0 ms, the KV took 2.0 ms"),
        (200, "completed: 9 tokens, the last ones from d-0 (stop)"),
    ]
    assert {step.process for step in steps} == {"gateway-0"}


def test_a_loss_is_a_step_and_a_report_of_nonsense_raises_nothing() -> None:
    loss = {"at_ms": 30.0, "instances": ("d-0",), "num_tokens": 1, "cause": "it is gone"}
    steps = list(stages({"losses": [loss], "ttft_ms": "x", "e2e_ms": None}, "g", 1.0))
    assert [step.what for step in steps] == [
        "accepted: call of ?, 0 prompt tokens",
        "lost d-0 after 1 token: it is gone",
        "ended: 0 tokens",
    ]
    for losses in (None, 3, "x", ["x", None], {"at_ms": 1.0}):
        assert len(list(stages({"losses": losses}, "g", 1.0))) == 2
    for e2e_ms in (float("nan"), float("inf"), 10**400, -1e300):
        assert {step.at for step in stages({"e2e_ms": e2e_ms}, "g", 1.0)} == {1.0}
    steps = list(stages({"losses": [{"instances": None}]}, "g", 1.0))
    assert steps[1].what == "lost no instance after 0 tokens: no cause is told"
