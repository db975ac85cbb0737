"""Through the whole mesh, one tenant can learn nothing about another's prompts, by count or by
clock (F40).
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
NUM_TOKENS = 768  # twelve blocks: 60 ms of the sim's prefill, which a busy machine does not hide
NUM_CACHED = 704  # the last block is computed, since the first draw needs its last token
NUM_OWN = 50
MAX_AUC = 0.6
MIN_AUC = 0.7  # 4 sigma from a guess, with this many probes of each kind


def auc(hits: Sequence[float], misses: Sequence[float]) -> float:
    """How well speed tells hits from misses: 0.5 is a guess, 1.0 is certain (Mann-Whitney)."""
    ranked = sorted([(t, True) for t in hits] + [(t, False) for t in misses])
    rank_sum = sum(rank for rank, (_, is_hit) in enumerate(ranked, start=1) if is_hit)
    u = rank_sum - len(hits) * (len(hits) + 1) / 2
    return 1.0 - u / (len(hits) * len(misses))


class Asker:
    """One tenant's client."""

    def __init__(self, client: httpx.AsyncClient, key: str) -> None:
        self._client, self._headers = client, {"authorization": f"Bearer {key}"}

    async def ask(self, prompt: list[int]) -> tuple[float, int]:
        """(seconds until the answer of one token, cached_tokens)."""
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
    """B guesses A's prompts exactly, and sends the same number of prompts that are new to the mesh.

    The control: when A sends its own prompts again, the hits do show.
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
        # The probes are shuffled, so that a machine that is busy for a while slows all kinds alike.
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
        "A finds its own prompts"
    )
    assert auc(times["own"], times["unknown"]) > MIN_AUC, "the clock can show a shared prefix"
    assert 1.0 - MAX_AUC < auc(times["known"], times["unknown"]) < MAX_AUC
