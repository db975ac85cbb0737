from array import array

import numpy as np
import pytest

from pdmesh.engine.base import FinishReason, Sampling
from pdmesh.engine.sim.batch import DecodeBatch, Running
from pdmesh.engine.sim.memory import PagedMemory
from pdmesh.engine.sim.model import SimModel, SimParams, draw_key, mix, mix_words
from pdmesh.engine.sim.vocabulary import EOS_ID
from tests.support.sim_reference import sim_reference

PARAMS = SimParams(block_size=16, max_model_len=512, eos_period=0)
MODEL = SimModel(PARAMS)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 50_000, length).tolist()
    return tokens


def written(prompt: list[int]) -> tuple[PagedMemory, list[int], int]:
    """Memory with the prompt's KV in scattered blocks, the ids of these blocks, and the KV's
    digest.
    """
    memory = PagedMemory(MODEL, 64)
    blocks = [(7 * n + 3) % 64 for n in range(-(-len(prompt) // PARAMS.block_size))]
    memory.write(blocks, MODEL.states(np.array(prompt, np.uint32)), 0)
    return memory, blocks, memory.digest(blocks, len(prompt))


def test_vectorised_and_integer_mixing_agree() -> None:
    values = [0, 1, 2**63, 2**64 - 1, 123456789]
    assert mix_words(np.array(values, np.uint64)).tolist() == [mix(v) for v in values]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 100])
def test_the_digest_of_written_memory_equals_that_of_the_reference(length: int) -> None:
    prompt = prompt_of(length)
    _, _, digest = written(prompt)
    state = expected = 0
    for at, token in enumerate(prompt):
        state = (state + (token + 1) * int(MODEL.state_weights[at])) % 2**64
        expected = (expected + mix(state) * int(MODEL.token_gain[at])) % 2**64
    assert digest == expected


@pytest.mark.parametrize("layer", range(PARAMS.num_layers))
def test_any_single_changed_byte_changes_the_digest(layer: int) -> None:
    prompt = prompt_of(24)
    memory, blocks, digest = written(prompt)
    for position in range(24):
        block, row = blocks[position // 16], position % 16
        for byte in range(0, PARAMS.token_bytes, 5):
            cell = memory.caches[layer][block]
            at = row * PARAMS.token_bytes + byte
            cell[at] ^= 0x40
            assert memory.digest(blocks, 24) != digest
            cell[at] ^= 0x40
    assert memory.digest(blocks, 24) == digest


def test_swapped_zeroed_or_foreign_blocks_change_the_digest() -> None:
    prompt = prompt_of(48)
    memory, blocks, digest = written(prompt)
    assert memory.digest([blocks[1], blocks[0], blocks[2]], 48) != digest
    _, _, other = written(prompt_of(48, seed=1))
    assert other != digest
    memory.caches[1][blocks[1]] = 0
    assert memory.digest(blocks, 48) != digest


def test_bytes_past_the_last_token_do_not_matter() -> None:
    memory, blocks, digest = written(prompt_of(20))
    memory.caches[0][blocks[1], 4 * PARAMS.token_bytes :] = 255
    assert memory.digest(blocks, 20) == digest


def test_the_kv_of_a_token_depends_on_all_tokens_before_it() -> None:
    one, other = prompt_of(40), prompt_of(40)
    other[0] += 1
    states = [MODEL.states(np.array(p, np.uint32)) for p in (one, other)]
    rows = [MODEL.kv_words(s, slice(0, 1))[0] for s in states]
    assert (rows[0] != rows[1]).all(axis=1).all()


def test_writing_from_a_block_boundary_leaves_the_cached_prefix_alone() -> None:
    prompt = prompt_of(40)
    memory, blocks, digest = written(prompt)
    kept = memory.caches[0][blocks[0]].copy()
    memory.caches[0][blocks[1]] = 0
    memory.write(blocks, MODEL.states(np.array(prompt, np.uint32)), 16)
    assert (memory.caches[0][blocks[0]] == kept).all()
    assert memory.digest(blocks, 40) == digest


def running(leg: int, prompt: list[int], first: int, sampling: Sampling) -> Running:
    states = MODEL.states(np.array(prompt, np.uint32))
    _, _, digest = written(prompt)
    key = draw_key(sampling, 0)
    return Running(
        leg, int(states[-1]), digest, len(prompt), first, key,
        sampling.max_tokens - 1, sampling.ignore_eos, sampling.stop_token_ids,
    )  # fmt: skip


def test_a_batch_draws_the_same_tokens_as_the_reference_for_single_requests() -> None:
    """Sequences of different lengths join and leave at different steps."""
    batch = DecodeBatch(MODEL, 8)
    samplings = [Sampling(max_tokens=3 + 5 * n, temperature=n % 2, seed=n) for n in range(6)]
    prompts = [prompt_of(10 + 9 * n, seed=n) for n in range(6)]
    expected = [sim_reference(p, s, PARAMS) for p, s in zip(prompts, samplings, strict=True)]
    got: dict[int, list[int]] = {}
    for leg in range(6):
        first = expected[leg][0][0]
        got[leg] = [first]
        batch.join(running(leg, prompts[leg], first, samplings[leg]))
        collect(batch, got, expected)
    while len(batch):
        collect(batch, got, expected)
    assert [got[leg] for leg in range(6)] == [tokens for tokens, _ in expected]


def collect(
    batch: DecodeBatch,
    got: dict[int, list[int]],
    expected: list[tuple[list[int], FinishReason]],
) -> None:
    step = batch.step()
    for leg, token in zip(step.legs, step.token_ids, strict=True):
        got[leg].append(token)
    for leg, reason in step.finished:
        assert reason is expected[leg][1]
        assert batch.leave(leg).tolist() == got[leg][1:]


def test_temperature_zero_ignores_the_seed_and_sampling_uses_it() -> None:
    prompt = prompt_of(30)

    def draw(temperature: float, seed: int) -> list[int]:
        sampling = Sampling(max_tokens=8, temperature=temperature, seed=seed)
        return sim_reference(prompt, sampling, PARAMS)[0]

    assert draw(0, 1) == draw(0, 2)
    assert draw(1, 1) == draw(1, 1)
    assert len({tuple(draw(1, seed)) for seed in range(4)} | {tuple(draw(0, 1))}) == 5


def test_text_sometimes_ends_by_itself_unless_eos_is_ignored() -> None:
    params = SimParams(block_size=16, max_model_len=512, eos_period=20)
    results = [sim_reference(prompt_of(9, n), Sampling(max_tokens=200), params) for n in range(30)]
    stopped = [tokens for tokens, reason in results if reason is FinishReason.STOP]
    assert len(stopped) > 20
    assert all(tokens[-1] == EOS_ID and EOS_ID not in tokens[:-1] for tokens in stopped)
    tokens, reason = sim_reference(prompt_of(9), Sampling(max_tokens=200, ignore_eos=True), params)
    assert (len(tokens), reason) == (200, FinishReason.LENGTH)
    assert EOS_ID not in tokens


def test_output_ends_at_the_end_of_the_context() -> None:
    tokens, reason = sim_reference(prompt_of(500), Sampling(max_tokens=100), PARAMS)
    assert (500 + len(tokens), reason) == (512, FinishReason.LENGTH)


def test_a_stop_token_of_the_client_ends_the_text() -> None:
    free, _ = sim_reference(prompt_of(30), Sampling(max_tokens=20), PARAMS)
    sampling = Sampling(max_tokens=20, stop_token_ids=frozenset({free[7]}))
    tokens, reason = sim_reference(prompt_of(30), sampling, PARAMS)
    assert reason is FinishReason.STOP
    assert tokens == free[: free.index(free[7]) + 1]


def test_continuing_from_emitted_tokens_gives_the_same_text() -> None:
    """As in a migration, the new prompt is the old prompt and the tokens that the client has."""
    prompt = prompt_of(30)
    whole, _ = sim_reference(prompt, Sampling(max_tokens=40), PARAMS)
    for cut in (1, 17, 39):
        rest, _ = sim_reference(prompt + whole[:cut], Sampling(max_tokens=40 - cut), PARAMS)
        assert whole[:cut] + rest == whole


def test_token_arrays_are_read_without_a_copy() -> None:
    assert MODEL.states(np.frombuffer(array("I", [1, 2, 3]), np.uint32)).shape == (3,)
