"""A prefill and a decode on vLLM in containers, with a small real model.

This is `ENGINE=vllm` of docker-compose.yml.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.compose.asking import ask, ask_grpc
from tests.compose.cluster import Cluster

# The first build of the image installs 5 GB of packages. Later builds find them in the cache.
pytestmark = [pytest.mark.compose, pytest.mark.nightly, pytest.mark.timeout(3600)]

PAIR = ["prefill-0", "decode-0"]
OTHERS = ["gateway", "master-scheduler", "kv-cache-index", "health-monitor"]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(*PAIR, *OTHERS, timeout_s=1500, ENGINE="vllm") as running:
        yield running


def test_the_pair_runs_the_real_model(cluster: Cluster) -> None:
    assert cluster.services == sorted([*PAIR, *OTHERS, "nats", "redis"])
    rows = json.loads(cluster.pdmesh("status", "--json"))["rows"]
    found = {r["id"]: (r["role"], r["engine"], r["model"]) for r in rows if r["role"]}
    model = "SmolLM2-135M-Instruct"
    assert found == {
        "prefill-0": ("prefill", "vllm", model),
        "decode-0": ("decode", "vllm", model),
    }


@pytest.mark.req("S74")
def test_the_model_answers_over_http_and_grpc_with_kv_from_the_prefill(cluster: Cluster) -> None:
    assert ask(cluster).strip() == ANSWER
    assert ask_grpc(cluster).strip() == ANSWER
    assert cluster.metric("decode-0", "pdmesh_kv_transfer_bytes_total") > 0


@pytest.mark.req("S74")
def test_a_killed_decode_loads_the_model_again_and_the_prefill_answers_meanwhile(
    cluster: Cluster,
) -> None:
    num_restarts = cluster.inspect("decode-0")["RestartCount"]
    cluster.kill_process("decode-0")
    assert ask(cluster).strip() == ANSWER
    cluster.wait_restarted("decode-0", num_restarts + 1, timeout_s=600)
    assert ask(cluster).strip() == ANSWER
