"""LoRA adapters stay in effect after a hand-over and a death, and never use another adapter's KV.

Requests use two adapters of random weights and the model itself, all at the same time. Plain vLLM,
which is vLLM without the mesh, must give the same answers with the same adapters.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdmesh.core.adapters.adapter import Adapter
from pdmesh.engine.base import Failed, Sampling, TicketOpened
from pdmesh.errors import AdapterUnusable
from pdmesh.kv.tiers.config import TierConfig
from tests.e2e.cases import VOCABULARY, Case, differences
from tests.e2e.conftest import decode_config, plain_vllm, prefill_config
from tests.e2e.pair import Host, Pair, locally, running
from tests.fakes.lora_adapters import write_adapter

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
# few prompts per adapter, because on a CPU rows with an adapter take many times as long
NUM_PROMPTS = 8
NUM_TOKENS = 10
NUM_LOADS = 20
LORA: dict[str, Any] = {"max_adapters": 2, "max_adapter_rank": 8}
TIERS = TierConfig(host_pool_bytes=64 << 20, timeout_s=30.0)
Generate = Callable[[Adapter | None, Sequence[int], Sampling], Awaitable[list[int]]]


@dataclass(frozen=True)
class Wanted:
    """The cases with their adapters, and the answers of plain vLLM."""

    adapters: dict[str, Adapter]
    cases: list[Case]
    tokens: list[list[int]]

    def adapter_of(self, case: Case) -> Adapter | None:
        return self.adapters[Path(case.adapter).name] if case.adapter else None


@pytest.fixture(scope="module")
def wanted(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {
        name: Adapter(name, write_adapter(folder / name, seed, model=model_dir), str(folder / name))
        for seed, name in enumerate(("one", "two", "three"))
    }
    rng = random.Random(5)
    prompts = [
        tuple(rng.choices(VOCABULARY, k=rng.choice((3, 20, 64, 70)))) for _ in range(NUM_PROMPTS)
    ]
    cases = [
        Case(prompt, NUM_TOKENS, 1.3 * (index % 2), 1000 + index, adapter=path)
        for index, prompt in enumerate(prompts)
        for path in (adapters["one"].path, adapters["two"].path, "")
    ]
    # There is one more slot than adapters, because on a CPU vLLM uses the last slot for rows
    # without an adapter.
    with plain_vllm(
        model_dir, cases, tmp_path_factory.mktemp("adapted"),
        enable_lora=True, max_loras=3, max_lora_rank=8, max_num_batched_tokens=512,
    ) as plain:  # fmt: skip
        return Wanted(adapters, cases, plain.tokens())


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapted(model_dir: Path, wanted: Wanted) -> AsyncIterator[Pair]:
    """A pair with slots for adapters. The prefill also has a host pool."""
    prefill = replace(prefill_config(model_dir), tiers=TIERS, **LORA)
    decode = replace(decode_config(model_dir), **LORA)
    async with running(prefill) as p, running(decode) as d:
        yield Pair(p, d)
        await p.until_idle()
        await d.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fusion(model_dir: Path, wanted: Wanted) -> AsyncIterator[Host]:
    config = replace(prefill_config(model_dir), instance_id="fusion-0", staging_bytes=0, **LORA)
    async with running(config) as host:
        yield host
        await host.until_idle()


async def answers(
    wanted: Wanted, cases: Sequence[Case], generate: Generate, num_concurrent: int = 6
) -> list[list[int]]:
    """The answers to requests for different adapters, which run at the same time."""
    slots = asyncio.Semaphore(num_concurrent)

    async def one(case: Case) -> list[int]:
        async with slots:
            return await generate(wanted.adapter_of(case), case.prompt, case.sampling())

    return list(await asyncio.gather(*map(one, cases)))


def through(pair: Pair, num_drawn: int = 0) -> Generate:
    async def generate(
        adapter: Adapter | None, prompt: Sequence[int], sampling: Sampling
    ) -> list[int]:
        own = replace(pair, adapter=adapter, salt=f"{pair.salt}-{num_drawn}")
        tokens = await own.generate(prompt, replace(sampling, num_drawn=num_drawn))
        assert own.num_computed_at_decode == 0
        return tokens

    return generate


def alone(host: Host, num_drawn: int = 0) -> Generate:
    return lambda adapter, prompt, s: locally(
        host, prompt, replace(s, num_drawn=num_drawn), adapter
    )


def test_each_adapter_answers_in_its_own_way(wanted: Wanted) -> None:
    """Otherwise, the equality of answers would prove nothing."""
    ones, twos, plain = (wanted.tokens[at::3] for at in range(3))
    for some, others in ((ones, twos), (ones, plain), (twos, plain)):
        assert len(differences(some, others)) > NUM_PROMPTS * 0.9


@pytest.mark.req("S1", "S49", "S80")
async def test_a_pair_draws_what_one_engine_draws(adapted: Pair, wanted: Wanted) -> None:
    got = await answers(wanted, wanted.cases, through(adapted))
    assert differences(wanted.tokens, got) == []
    loaded = sorted(wanted.adapters[name].digest for name in ("one", "two"))
    assert list(adapted.prefill.adapters) == list(adapted.decode.adapters) == loaded


@pytest.mark.req("S48")
async def test_a_pair_draws_the_same_with_kv_handed_over_per_layer(
    adapted: Pair, wanted: Wanted
) -> None:
    def per_layer(
        adapter: Adapter | None, prompt: Sequence[int], s: Sampling
    ) -> Awaitable[list[int]]:
        return replace(adapted, adapter=adapter, salt="layers").generate_per_layer(prompt, s)

    got = await answers(wanted, wanted.cases, per_layer)
    assert differences(wanted.tokens, got) == []


@pytest.mark.req("S72")
async def test_fusion_draws_what_one_engine_draws(fusion: Host, wanted: Wanted) -> None:
    got = await answers(wanted, wanted.cases, alone(fusion), 12)
    assert differences(wanted.tokens, got) == []


@pytest.mark.req("S37")
@pytest.mark.parametrize("num_drawn", [1, 2, 5, NUM_TOKENS - 2])
async def test_an_answer_continues_with_its_adapter_after_a_death_at_any_token(
    adapted: Pair, fusion: Host, wanted: Wanted, num_drawn: int
) -> None:
    """As at a gateway, the tokens drawn before the death are part of the new prompt."""
    replayed = [
        replace(case, prompt=(*case.prompt, *tokens[:num_drawn]), max_tokens=NUM_TOKENS - num_drawn)
        for case, tokens in zip(wanted.cases, wanted.tokens, strict=True)
    ]
    rest = [tokens[num_drawn:] for tokens in wanted.tokens]
    got = await answers(wanted, replayed, through(adapted, num_drawn))
    assert differences(rest, got) == []
    got = await answers(wanted, replayed, alone(fusion, num_drawn), 12)
    assert differences(rest, got) == []


@pytest.mark.req("S77", "S80")
async def test_new_content_under_the_same_name_uses_no_old_kv(
    adapted: Pair, wanted: Wanted, tmp_path: Path
) -> None:
    """The pair has a prefix cache, a host pool, and two slots for three contents.

    vLLM issues 42125 and 48352 describe how old KV could be used here.
    """
    path = str(tmp_path / "same")
    prompt = tuple(random.Random(9).choices(VOCABULARY, k=200))
    greedy, cached = Sampling(NUM_TOKENS), dict[str, list[int]]()
    drawn: dict[str, list[list[int]]] = {}
    for name in ("one", "two", "one", "three", "two"):
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        await asyncio.to_thread(shutil.copytree, wanted.adapters[name].path, path)
        named = Adapter("same", wanted.adapters[name].digest, path)
        own = replace(adapted, adapter=named, salt="reloaded")
        first = await own.prefilled(prompt, greedy)
        assert first.ticket is not None
        tokens = [first.token, *await own.decoded(prompt, first.token, first.ticket, greedy)]
        cached.setdefault(name, []).append(first.num_cached_tokens)
        drawn.setdefault(name, []).append(tokens)
    assert cached == {"one": [0, 192], "two": [0, 192], "three": [0]}
    for first_time, *later in drawn.values():
        assert all(tokens == first_time for tokens in later)
    assert len({tuple(each[0]) for each in drawn.values()}) == 3


async def failure_of(pair: Pair, prompt: Sequence[int], *, is_per_layer: bool) -> str:
    """The reason why a prompt's prefill fails. The prefill may open its ticket before it fails."""
    leg = await pair.start_prefill(prompt, Sampling(4), is_per_layer=is_per_layer)
    output = await pair.prefill.next_output(leg)
    if isinstance(output, TicketOpened):
        output = await pair.prefill.next_output(leg)
    del pair.prefill.legs[leg]
    assert isinstance(output, Failed), output
    return output.reason


async def test_an_adapter_that_cannot_be_loaded_fails_only_its_own_requests(
    adapted: Pair, model_dir: Path, wanted: Wanted, tmp_path: Path
) -> None:
    good, prompt = wanted.adapters["one"], wanted.cases[0].prompt
    write_adapter(tmp_path / "large", 1, model=model_dir, rank=16)
    write_adapter(tmp_path / "other", 1)
    pissa = write_adapter(tmp_path / "pissa", 1, model=model_dir, init_lora_weights="pissa")
    engine = adapted.prefill.engine
    for name, said in (
        ("large", "r is 16; the highest rank here is 8"),
        ("other", r"\[576, 576\] in the model, and \[64, 64\]"),
        ("nowhere", "No such file"),
    ):
        with pytest.raises(AdapterUnusable, match=said):
            await engine.inspect_adapter(str(tmp_path / name))
    for bad in (
        Adapter("changed", "0" * 64, good.path),
        Adapter("pissa", pissa, str(tmp_path / "pissa")),  # vLLM refuses this adapter
    ):
        own = replace(adapted, adapter=bad, salt="bad")
        assert await failure_of(own, prompt, is_per_layer=False) == "ADAPTER_UNUSABLE"
        assert await failure_of(own, prompt, is_per_layer=True) == "ADAPTER_UNUSABLE"
    good_pair = replace(adapted, adapter=good, salt="after")
    assert await good_pair.generate(prompt, wanted.cases[0].sampling()) == wanted.tokens[0]


async def test_an_adapter_that_is_loaded_gives_signs_of_work(adapted: Pair, wanted: Wanted) -> None:
    """Each layer that vLLM's worker loads gives a sign of work, although no step runs."""
    host, digests = adapted.decode, [a.digest for a in wanted.adapters.values()]
    own = replace(adapted, adapter=wanted.adapters["three"])
    plain = replace(adapted, adapter=None)

    async def num_signs(salt: str, *, is_loaded: bool) -> int:
        before = await reported(f"before {salt}")
        for n in range(NUM_LOADS):
            if not is_loaded:
                host.engine.keep_adapters([])
                await host.until(lambda: not host.adapters)
            await replace(own, salt=f"{salt} {n}").generate((5, 6, 7), Sampling(2))
        return await reported(f"after {salt}") - before

    async def reported(salt: str) -> int:
        """The number of signs so far. An engine reports new signs a few times a second."""
        before = host.engine.stats().num_signs
        for n in itertools.count():
            await replace(plain, salt=f"{salt} {n}").generate((5, 6, 7), Sampling(2))
            if host.engine.stats().num_signs != before:
                break
        return host.engine.stats().num_signs

    loading = await num_signs("loading", is_loaded=False)
    host.engine.keep_adapters(digests)
    await own.generate((5, 6, 7), Sampling(2))
    loaded = await num_signs("loaded", is_loaded=True)
    assert loading > 2 * loaded, (loading, loaded)


async def test_a_removed_adapter_leaves_its_slot(adapted: Pair, wanted: Wanted) -> None:
    one, two = wanted.adapters["one"], wanted.adapters["two"]
    for adapter in (one, two):
        await replace(adapted, adapter=adapter, salt="slots").generate((5, 6, 7), Sampling(3))
    for host in (adapted.prefill, adapted.decode):
        host.engine.keep_adapters([two.digest])
        await host.until(partial(_has_only, host, two.digest))
        host.engine.keep_adapters([a.digest for a in wanted.adapters.values()])
    case, tokens = wanted.cases[0], wanted.tokens[0]
    again = replace(adapted, adapter=one, salt="again")
    assert await again.generate(case.prompt, case.sampling()) == tokens


def _has_only(host: Host, digest: str) -> bool:
    return host.adapters == (digest,)
