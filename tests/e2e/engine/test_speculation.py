"""A decode with speculation draws the same tokens as without, also with handed-over KV.

With speculation, a decode proposes several tokens and checks them in one step.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.core.sampling.logit_shaping import LogitShaping
from pdmesh.core.speculation.proposal_length import PROBE_EVERY, Method, Speculation
from pdmesh.engine.base import KvReceived, Sampling, Tokens
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import Reference, decode_config, plain_vllm, prefill_config
from tests.e2e.pair import Host, Pair, locally, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
Copied = tuple[list[Case], list[list[int]]]  # cases, and the tokens that plain vLLM draws
FIXED = Speculation(4, 0.6, 0.05, is_fixed=True)
MAX_LEN = 256  # the fusion engine's longest context, whose last position answers reach
NUM_DRAWS = 300


def copies() -> list[Case]:
    """Prompts that repeat a text and end within it, so that the model continues the repetition."""
    rng = random.Random(5)
    cases = []
    for length in (12, 25, 40, 60):
        text = rng.choices(VOCABULARY, k=length)
        prompt = (text * 9)[: 3 * length + 5]
        cases.append(Case(tuple(prompt), min(60, MAX_LEN - len(prompt))))
    return cases


@pytest.fixture(scope="module")
def copied(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Copied:
    """The repetitive prompts and plain vLLM's tokens, each cut at its first near-tie.

    At a near-tie, two tokens are almost equally likely, so rounding may decide.
    """
    with plain_vllm(model_dir, copies(), tmp_path_factory.mktemp("copies")) as plain:
        return plain.decided(copies())


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def speculating(pair: Pair, model_dir: Path) -> AsyncIterator[Pair]:
    """The pair's prefill, which proposes nothing, and a decode that always proposes four tokens."""
    config = replace(
        decode_config(model_dir), instance_id="decode-f", max_num_seqs=8, speculation=FIXED
    )
    async with running(config) as decode:
        yield Pair(pair.prefill, decode)


def num_accepted(host: Host) -> int:
    return int(host.engine.stats().extra["num_accepted_tokens"])


@asynccontextmanager
async def with_draft(model_dir: Path, speculation: Speculation) -> AsyncIterator[Pair]:
    """A prefill that computes the draft's KV, and a decode that proposes with the draft."""
    first = replace(
        prefill_config(model_dir), instance_id="prefill-d", speculation=speculation.at_prefill()
    )
    second = replace(decode_config(model_dir), instance_id="decode-d", speculation=speculation)
    async with running(first) as prefill, running(second) as decode:
        assert prefill.info.model_fingerprint == decode.info.model_fingerprint
        yield Pair(prefill, decode)
        await decode.until_idle()
        await prefill.until_idle()


@pytest.mark.nightly
@pytest.mark.req("S67", "S109", "S113")
async def test_the_kv_of_a_draft_model_is_handed_over(model_dir: Path, copied: Copied) -> None:
    """The draft is the model itself. So each proposal is right if the draft's KV is right."""
    cases, tokens = copied
    speculation = Speculation(4, 0.6, 0.001, Method.DRAFT_MODEL, str(model_dir))
    async with with_draft(model_dir, speculation) as run:
        for generate in (run.generate, run.generate_per_layer):
            got = await generate_all(generate, cases, num_concurrent=2)
            assert differences(tokens, got) == []
        assert run.num_computed_at_decode == 0
        counted = run.decode.engine.stats().extra
        assert counted["num_proposed_tokens"] > 100
        assert counted["num_accepted_tokens"] > 0.9 * counted["num_proposed_tokens"]


def make_head(folder: Path, model_dir: Path) -> None:
    """Write an EAGLE head with random weights. It has one layer, whose KV has the model's shape."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model_dir / "config.json").read_text())
    config["num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    size, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc": (size, 2 * size),
        "layers.0.self_attn.q_proj": (size, size),
        "layers.0.self_attn.k_proj": (kv, size),
        "layers.0.self_attn.v_proj": (kv, size),
        "layers.0.self_attn.o_proj": (size, size),
        "layers.0.mlp.gate_proj": (inner, size),
        "layers.0.mlp.up_proj": (inner, size),
        "layers.0.mlp.down_proj": (size, inner),
    }
    rng = torch.Generator().manual_seed(3)
    weights = {f"{n}.weight": torch.randn(s, generator=rng) * 0.05 for n, s in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(size)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.nightly
@pytest.mark.req("S67", "S109", "S112", "S115")
async def test_the_kv_of_an_eagle_head_is_handed_over(
    pair: Pair,
    model_dir: Path,
    copied: Copied,
    tmp_path: Path,
) -> None:
    """A random head is almost always wrong, but the answers stay the same. The head's KV is one
    more layer in each block.
    """
    cases, tokens = copied
    make_head(tmp_path, model_dir)
    speculation = Speculation(4, 0.2, 0.001, Method.EAGLE, str(tmp_path))
    async with with_draft(model_dir, speculation) as run:
        for generate in (run.generate, run.generate_per_layer):
            got = await generate_all(generate, cases, num_concurrent=2)
            assert differences(tokens, got) == []
        assert run.num_computed_at_decode == 0
        counted = run.decode.engine.stats().extra
        assert counted["num_proposed_tokens"] > 50
        assert counted["num_accepted_tokens"] < counted["num_proposed_tokens"] / 2
        with_head, without = run.prefill.info, pair.prefill.info
        assert with_head.kv_bytes_per_token * 30 == without.kv_bytes_per_token * 31
        # So an instance with a head takes no KV from an instance without one.
        assert with_head.model_fingerprint != without.model_fingerprint


@pytest.mark.req("S118")
async def test_a_decode_that_proposes_tokens_draws_what_plain_vllm_draws(
    pair: Pair, reference: Reference, model_dir: Path
) -> None:
    """A single request gets four proposals per step. Larger batches get fewer, and the largest gets
    none.
    """
    speculation = Speculation(4, 0.6, 0.05)
    assert {count for _, _, count in speculation.schedule(32)} >= {4, 1, 0}
    config = replace(
        decode_config(model_dir), instance_id="decode-s", max_num_seqs=32, speculation=speculation
    )
    async with running(config) as decode:
        run = Pair(pair.prefill, decode)
        todo = reference.cases[:60]
        got = await generate_all(run.generate, todo[:20], num_concurrent=1)
        got += await generate_all(run.generate, todo[20:], num_concurrent=30)
        assert differences(reference.tokens[:60], got) == []
        assert run.num_handed_over >= 40
        assert run.num_computed_at_decode == 0
        await decode.until_idle()
    await pair.prefill.until_idle()


@pytest.mark.nightly
@pytest.mark.req("S118")
async def test_a_decode_without_a_schedule_tries_tokens_and_counts_the_right_ones(
    pair: Pair, model_dir: Path
) -> None:
    """The schedule is all zeros, so the decode only tries a proposal now and then. Whether more
    proposals follow depends on the cost of a token on this machine. `tests/unit/core/speculation`
    tests this with fixed times.
    """
    speculation = Speculation(4, 0.0, 0.001)
    assert speculation.schedule(8) == [(1, 8, 0)]
    config = replace(
        decode_config(model_dir), instance_id="decode-s", max_num_seqs=8, speculation=speculation
    )
    async with running(config) as decode:
        run = Pair(pair.prefill, decode)
        rng = random.Random(3)
        prompts = [rng.choices(VOCABULARY, k=6) * 40 for _ in range(8)]
        answers = await asyncio.gather(*(run.generate(p, Sampling(256)) for p in prompts))
        counted = decode.engine.stats().extra
        num_repeated = sum(answer[100:160] == answer[106:166] for answer in answers)
        assert num_repeated >= 2, "the model continues the repetition"
        num_tries = 256 // PROBE_EVERY
        assert counted["num_proposed_tokens"] >= num_repeated * (num_tries - 1)
        assert counted["num_accepted_tokens"] > counted["num_proposed_tokens"] / 2
        await decode.until_idle()
    await pair.prefill.until_idle()


@pytest.mark.req("S110", "S116")
async def test_a_copy_takes_a_fraction_of_the_steps_and_has_the_same_tokens(
    speculating: Pair, copied: Copied
) -> None:
    """A step draws one token and the accepted proposals. So the counts give the number of steps."""
    cases, tokens = copied
    before = num_accepted(speculating.decode)
    got = await generate_all(speculating.generate, cases, num_concurrent=1)
    assert differences(tokens, got) == []
    num_drawn = sum(len(answer) - 1 for answer in got)  # tokens that the decode drew
    num_steps = num_drawn - (num_accepted(speculating.decode) - before)
    assert num_drawn > 100
    assert num_drawn >= 1.5 * num_steps
    got = await generate_all(speculating.generate, cases, num_concurrent=len(cases))
    assert differences(tokens, got) == []
    assert speculating.num_computed_at_decode == 0
    await speculating.decode.until_idle()


@pytest.mark.req("S67", "S37")
async def test_an_answer_that_is_moved_amid_its_proposals_goes_on_as_it_was(
    speculating: Pair, copied: Copied
) -> None:
    """The decode is aborted after a step that drew several tokens. The new prompt has the drawn
    tokens, but no proposals.
    """
    cases, tokens = copied
    before = num_accepted(speculating.decode)
    for case, expected in zip(cases, tokens, strict=True):
        drawn = await begun(speculating, case)
        assert 3 < len(drawn) < len(expected)
        sampling = replace(
            case.sampling(), max_tokens=case.max_tokens - len(drawn), num_drawn=len(drawn)
        )
        rest = await speculating.generate((*case.prompt, *drawn), sampling)
        assert drawn + rest == expected
    assert num_accepted(speculating.decode) - before > 50, "both decodes accepted proposals"
    await speculating.decode.until_idle()
    await speculating.prefill.until_idle()


async def begun(run: Pair, case: Case) -> list[int]:
    """The first tokens of a request whose decode is aborted early."""
    first = await run.prefilled(case.prompt, case.sampling())
    assert first.ticket is not None
    leg = await run.start_decode(case.prompt, first.token, first.ticket, case.sampling())
    assert isinstance(await run.decode.next_output(leg), KvReceived)
    drawn = [first.token]
    while len(drawn) < 8:
        output = await run.decode.next_output(leg)
        assert isinstance(output, Tokens)
        drawn += output.token_ids
    run.decode.abort(leg)
    return drawn


@pytest.mark.nightly
@pytest.mark.req("S116", "S72")
async def test_fusion_draws_the_same_up_to_the_models_last_position(
    model_dir: Path, copied: Copied
) -> None:
    cases, tokens = copied
    config = replace(
        prefill_config(model_dir),
        instance_id="fusion-f",
        staging_bytes=0,
        max_model_len=MAX_LEN,
        speculation=FIXED,
    )
    async with running(config) as fusion:
        got = await generate_all(lambda p, s: locally(fusion, p, s), cases, 4)
        assert differences(tokens, got) == []
        assert num_accepted(fusion) > 50
        prompt = cases[0].prompt
        to_the_end = await locally(fusion, prompt, Sampling(MAX_LEN - len(prompt)))
        assert len(prompt) + len(to_the_end) == MAX_LEN
        assert to_the_end[: len(tokens[0])] == tokens[0]
        again = await locally(fusion, *((cases[1].prompt, cases[1].sampling())))
        assert again == tokens[1], "the engine goes on"


@pytest.mark.nightly
@pytest.mark.req("S111")
async def test_draws_with_proposals_have_the_same_distribution(
    pair: Pair, speculating: Pair
) -> None:
    """Samples of the third token are compared by the chi-squared test. The control is a sample at
    another temperature.
    """
    prompt = tuple(random.Random(9).choices(VOCABULARY, k=6) * 6)

    async def sample(run: Pair, temperature: float, first_seed: int) -> Counter[int]:
        shaping = LogitShaping(top_k=6)
        cases = [
            Case(prompt, 4, temperature, first_seed + n, shaping=shaping) for n in range(NUM_DRAWS)
        ]
        return Counter(answer[2] for answer in await generate_all(run.generate, cases, 8))

    before = num_accepted(speculating.decode)
    plain = await sample(pair, 2.0, 1_000)
    proposed = await sample(speculating, 2.0, 5_000)
    assert num_accepted(speculating.decode) - before > NUM_DRAWS / 10
    assert not differ(plain, proposed)
    assert differ(plain, await sample(pair, 0.5, 9_000))


def differ(a: Counter[int], b: Counter[int]) -> bool:
    """Whether two samples of equal size differ at the significance level of 1 %."""
    frequent = [token for token, count in (a + b).most_common(8) if count >= 20]
    rows = [(a[token], b[token]) for token in frequent]
    rest = (a.total() - sum(x for x, _ in rows), b.total() - sum(y for _, y in rows))
    rows += [rest] if sum(rest) >= 20 else []
    return chi_squared(rows) > CRITICAL[len(rows) - 1]


# for 1 %, by degrees of freedom
CRITICAL = (0.0, 6.63, 9.21, 11.34, 13.28, 15.09, 16.81, 18.48, 20.09)


def chi_squared(rows: Sequence[tuple[int, int]]) -> float:
    return sum((x - y) ** 2 / (x + y) for x, y in rows)


@pytest.mark.nightly
@pytest.mark.req("S109")
async def test_suffix_decoding_draws_the_same(pair: Pair, model_dir: Path, copied: Copied) -> None:
    pytest.importorskip("arctic_inference")
    cases, tokens = copied
    config = replace(
        decode_config(model_dir),
        instance_id="decode-x",
        speculation=replace(FIXED, method=Method.SUFFIX),
    )
    async with running(config) as decode:
        run = Pair(pair.prefill, decode)
        assert differences(tokens, await generate_all(run.generate, cases, 2)) == []
        assert num_accepted(decode) > 50
