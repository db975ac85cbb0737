"""Speculation beside chunks of prompts and beside constraints, on vLLM with a tiny model.

With speculation, an engine proposes tokens and checks them in one step. This is the short form for
CI. `tests/e2e/engine` has more tests, with a model that writes text.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from pdmesh.core.speculation.proposal_length import Method, Speculation
from tests.e2e.cases import Case, differences, generate_all
from tests.e2e.conftest import engine_config
from tests.e2e.engine.test_speculation import with_draft
from tests.e2e.pair import Host, locally, running
from tests.e2e.tiny_ernie import write_tiny_ernie
from tests.e2e.tiny_llama import EOS, write_tiny_llama

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
CHUNK = 32  # tokens per step
BYTES = range(256)
FIXED = Speculation(4, 0.6, 0.05, is_fixed=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain(tiny: Path) -> AsyncIterator[Host]:
    """An engine that computes each prompt in one step, and proposes nothing."""
    async with running(replace(engine_config("plain-0", 1, tiny), max_num_seqs=8)) as host:
        yield host


@pytest.mark.nightly
@pytest.mark.req("S37", "S111")
async def test_a_seeded_token_1_does_not_depend_on_the_chunks_of_its_prompt_beside_a_draft(
    plain: Host, tiny: Path
) -> None:
    """As at a prefill, the engine also computes the draft's KV. The draws of all chunks except the
    last are discarded, and use no noise.
    """
    draft = Speculation(4, 0.6, 0.05, Method.DRAFT_MODEL, str(tiny)).at_prefill()
    config = replace(
        engine_config("chunked-0", 2, tiny),
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        speculation=draft,
    )
    rng = random.Random(4)
    lengths = [CHUNK // 2, *(CHUNK * n + 5 for n in range(1, 8))]
    cases = [Case(tuple(rng.choices(BYTES, k=n)), 1, 2.0, 90 + n) for n in lengths]
    expected = await generate_all(lambda p, s: locally(plain, p, s), cases, 1)
    async with running(config) as chunked:
        for num_concurrent in (1, len(cases)):
            got = await generate_all(lambda p, s: locally(chunked, p, s), cases, num_concurrent)
            assert differences(expected, got) == []
            await chunked.until_idle()
    reseeded = [replace(case, seed=1000 + n) for n, case in enumerate(cases)]
    others = await generate_all(lambda p, s: locally(plain, p, s), reseeded, 1)
    assert len(differences(expected, others)) > len(cases) // 2, "the noise decides the token"


FORMS = {
    "regex": r"((abc){2}[de]){6}",
    "choice": json.dumps(["no " * 20, "no, " * 16, "yes " * 16]),
    "grammar": 'root ::= (word " "){10}\nword ::= "cat" | "car" | "cow"',
}


@pytest.mark.req("S116", "S118")
async def test_proposals_end_where_a_constraint_would_refuse_them(plain: Host, tiny: Path) -> None:
    """The prompt shows an answer that is almost right. So proposals are accepted up to a letter
    that the form refuses. Greedy answers must equal the answers of an engine that proposes nothing.
    """
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    shown = ["abcabcd" * 3 + "abcabx", "no no no no, no" * 3, "cat car cow dog " * 4]
    cases = [
        Case(tuple(tokenizer.encode(text).ids), 64, stop_token_ids=(EOS,), form=form)
        for form in FORMS.items()
        for text in shown
    ]
    expected = await generate_all(lambda p, s: locally(plain, p, s), cases, 4)
    config = replace(engine_config("fusion-s", 3, tiny), max_num_seqs=8, speculation=FIXED)
    async with running(config) as host:
        for num_concurrent in (1, len(cases)):
            got = await generate_all(lambda p, s: locally(host, p, s), cases, num_concurrent)
            assert differences(expected, got) == []
        counted = host.engine.stats().extra
        assert counted["num_accepted_tokens"] > 50
        assert counted["num_proposed_tokens"] > counted["num_accepted_tokens"]
    texts = [tokenizer.decode(tokens) for tokens in expected]
    assert len(set(texts)) >= len(FORMS)
    assert all(tokens[-1] == EOS for tokens in expected[:3]), "each such answer ends"


@pytest.mark.nightly
@pytest.mark.req("S67", "S109", "S114")
async def test_the_kv_of_a_layer_for_multi_token_prediction_is_handed_over(tmp_path: Path) -> None:
    """The layer's proposals are nearly always right if the layer reads its own KV of the prompt.
    With another prompt's KV, the proposals are nearly always wrong.
    """
    model = write_tiny_ernie(tmp_path / "ernie")
    rng = random.Random(8)
    prompts = [tuple(rng.choices(BYTES, k=n)) for n in (70, 100, 130, 150, 190, 230)]
    cases = [Case(prompt, 40) for prompt in prompts]
    async with running(replace(engine_config("plain-1", 1, model), max_num_seqs=8)) as host:
        expected = await generate_all(lambda p, s: locally(host, p, s), cases, 4)
        without = host.info
    assert all(len(set(answer)) > 10 for answer in expected), "no answer is easy to guess"
    layer = Speculation(2, 0.6, 0.001, Method.MTP, is_fixed=True)
    async with with_draft(model, layer) as run:
        for generate, half in ((run.generate, slice(0, 3)), (run.generate_per_layer, slice(3, 6))):
            got = await generate_all(generate, cases[half], 2)
            assert differences(expected[half], got) == []
        assert run.num_computed_at_decode == 0
        counted = run.decode.engine.stats().extra
        assert counted["num_proposed_tokens"] > 100
        assert counted["num_accepted_tokens"] > 0.7 * counted["num_proposed_tokens"]
        with_layer = run.prefill.info
        assert with_layer.kv_bytes_per_token == 2 * without.kv_bytes_per_token
        assert with_layer.model_fingerprint != without.model_fingerprint
