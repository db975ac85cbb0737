"""Tests that one tenant learns nothing about the prompts of another tenant through a whole mesh.
Neither the number of cached tokens nor the response time may tell (F40).
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.tenancy.tenant import TenantEntry
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec

NUM_PROBES = 200
# These are twelve blocks, which take a simulated prefill 60 ms. Even on a busy machine, such a
# difference shows.
NUM_TOKENS = 768
NUM_CACHED = 704  # the last block is always computed, because the first draw needs its last token
NUM_OWN = 50
MAX_AUC = 0.6
MIN_AUC = 0.7  # with this many probes, the result of mere guessing is 4 sigma lower


def auc(hits: Sequence[float], misses: Sequence[float]) -> float:
    """How well response times separate hits from misses, by the Mann-Whitney test. 0.5 is as good
    as a guess, 1.0 is certain.
    """
    ranked = sorted([(t, True) for t in hits] + [(t, False) for t in misses])
    rank_sum = sum(rank for rank, (_, is_hit) in enumerate(ranked, start=1) if is_hit)
    u = rank_sum - len(hits) * (len(hits) + 1) / 2
    return 1.0 - u / (len(hits) * len(misses))


class Asker:
    def __init__(self, client: httpx.AsyncClient, key: str) -> None:
        self._client, self._headers = client, {"authorization": f"Bearer {key}"}

    async def ask(self, prompt: list[int]) -> tuple[float, int]:
        """The seconds until an answer of one token has come, and its `cached_tokens`."""
        body = {"model": "default", "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
        began = time.perf_counter()
        answer = await self._client.post("/v1/completions", json=body, headers=self._headers)
        took = time.perf_counter() - began
        assert answer.status_code == 200, answer.text
        return took, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.req("S80", "S126")
@pytest.mark.fault("F40")
async def test_two_hundred_probes_reveal_nothing_about_another_tenants_prompts(
    tmp_path: Path,
) -> None:
    """Tenant mallory sends exactly the prompts that tenant acme has sent, and as many prompts that
    are new to the mesh.

    As a control, acme sends its own prompts again, and these hits must show in the times.
    """
    rng = random.Random(40)
    prompts = [[rng.randrange(40, 120) for _ in range(NUM_TOKENS)] for _ in range(2 * NUM_PROBES)]
    known, unknown = prompts[:NUM_PROBES], prompts[NUM_PROBES:]
    keys = KeyFile(tenants={"acme": TenantEntry(), "mallory": TenantEntry()})
    secrets = {name: api_keys.issue(keys, name) for name in keys.tenants}
    path = tmp_path / "keys.json"
    api_keys.save(path, keys)
    spec = MeshSpec(
        engine="sim", http_port=0, grpc_port=0, keys_file=path, start_timeout_s=180,
        env={"PDMESH_SIM_LAW": "demo", "PDMESH_PREFILL_NUM_KV_BLOCKS": "8192"},
    )  # fmt: skip
    async with (
        Mesh(spec, tmp_path / "mesh") as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=60) as client,
    ):
        acme, mallory = Asker(client, secrets["acme"]), Asker(client, secrets["mallory"])
        for prompt in known:
            assert (await acme.ask(prompt))[1] == 0
        # The probes are in random order, so that a time in which the machine is busy slows all
        # kinds alike.
        probes = [(mallory, prompt, "known") for prompt in known]
        probes += [(mallory, prompt, "unknown") for prompt in unknown]
        probes += [(acme, prompt, "own") for prompt in known[:NUM_OWN]]
        rng.shuffle(probes)
        times: dict[str, list[float]] = {"known": [], "unknown": [], "own": []}
        for asker, prompt, kind in probes:
            took, num_cached = await asker.ask(prompt)
            assert num_cached == (NUM_CACHED if kind == "own" else 0), (
                "the cached tokens show what was not computed"
            )
            times[kind].append(took)
        again = [await mallory.ask(prompt) for prompt in known[:NUM_OWN]]
    assert [num_cached for _, num_cached in again] == [NUM_CACHED] * NUM_OWN, (
        "mallory finds the prompts that mallory asked before"
    )
    assert auc(times["own"], times["unknown"]) > MIN_AUC, "the clock can show a shared prefix"
    assert 1.0 - MAX_AUC < auc(times["known"], times["unknown"]) < MAX_AUC
