"""vLLM's asynchronous scheduler over our connector, with any order of ends, aborts and preemptions.

A fake rank draws a token from the request's name and the token's position. So every answer is known
beforehand, and a token at the wrong place is found. The test's loop works like vLLM's
`step_with_batch_queue`: it schedules a second step before it reads the output of the first.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.core.kv.prefix.block_hash import HASH_BYTES, block_hashes

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("default")  # vLLM itself raises these warnings
BLOCK_SIZE = 16
STEP_TOKENS = 48  # the longest prompts have more tokens
STOP = 7
SALT = "ab" * HASH_BYTES
VOCABULARY = 50


def token(key: str, position: int) -> int:
    """The token that the fake rank draws at a position. On average, one in 49 is the stop token."""
    return random.Random(f"{key} {position}").randrange(1, VOCABULARY)


def answer(key: str, num_prompt_tokens: int, max_tokens: int) -> list[int]:
    drawn: list[int] = []
    while len(drawn) < max_tokens:
        drawn.append(token(key, num_prompt_tokens + len(drawn)))
        if drawn[-1] == STOP:
            break
    return drawn


class Engine:
    """A scheduler and a fake rank."""

    def __init__(self, config: Any, num_blocks: int, *, is_async: bool) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from pdmesh.engine.vllm.connector.scheduler.timed_scheduler import (
            TimedAsyncScheduler,
            TimedScheduler,
        )

        config.scheduler_config.async_scheduling = is_async
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        kind = TimedAsyncScheduler if is_async else TimedScheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._depth = 2 if is_async else 1
        self._in_flight: deque[tuple[Any, Any, dict[str, set[int]]]] = deque()
        self._blocks: dict[str, list[int]] = {}  # each request's blocks, as the rank knows them
        self.prompts: dict[str, int] = {}
        self.requests: dict[str, Any] = {}
        self.drawn: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        # request, block index and name of each block saved to the host pool
        self.saved: list[tuple[str, int, bytes]] = []
        # blocks that a request got while a step of another request still writes them
        self.reused: list[tuple[str, str, set[int]]] = []

    def add(
        self, key: str, num_prompt_tokens: int, max_tokens: int, text_of: str | None = None
    ) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        prompt = [token(text_of or key, position) for position in range(num_prompt_tokens)]
        params = SamplingParams(
            max_tokens=max_tokens, stop_token_ids=[STOP], ignore_eos=True, detokenize=False
        )
        request = Request(key, prompt, params, None, cache_salt=SALT, block_hasher=self._hasher)
        self.prompts[key], self.requests[key], self.drawn[key] = num_prompt_tokens, request, []
        self.scheduler.add_request(request)

    def abort(self, key: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(key, RequestStatus.FINISHED_ABORTED)

    @property
    def is_idle(self) -> bool:
        return not (self._in_flight or self.scheduler.has_requests())

    def schedule(self) -> None:
        step = self.scheduler.schedule()
        self._watch_blocks(step)
        self._in_flight.append((step, self._compute(step), self._written(step)))

    @property
    def can_schedule(self) -> bool:
        return len(self._in_flight) < self._depth and self.scheduler.has_requests()

    def process(self) -> None:
        step, output, _ = self._in_flight.popleft()
        for told in self.scheduler.update_from_output(step, output).values():
            for each in told.outputs:
                self.drawn[each.request_id] += each.new_token_ids
                if each.finish_reason is not None:
                    self.finished[each.request_id] = str(each.finish_reason)
        for request in self.requests.values():
            assert min(request.all_token_ids) >= 0, "a placeholder is no token"

    @property
    def can_process(self) -> bool:
        return bool(self._in_flight)

    def _compute(self, step: Any) -> Any:
        """The output of the fake rank. A request whose prompt is complete gets a token."""
        from vllm.v1.outputs import ModelRunnerOutput

        cached = step.scheduled_cached_reqs
        num_drawn = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        sampled = []
        for key, (_, end) in computed_by(step).items():
            is_known = end < self.prompts[key] + num_drawn.get(key, 0)
            sampled.append([] if is_known else [token(key, end)])
        for save in step.kv_connector_metadata.tiers.saves:
            (block_ids,) = save.block_ids  # the model has one cache group
            for index, block_id in enumerate(block_ids, len(save.names) - len(block_ids)):
                (key,) = (
                    key
                    for key in step.num_scheduled_tokens
                    if self._blocks[key][index : index + 1] == [block_id]
                )
                self.saved.append((key, index, save.names[index]))
        keys = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(keys, {key: n for n, key in enumerate(keys)}, sampled)

    def _watch_blocks(self, step: Any) -> None:
        """Record each request's blocks. Also record new blocks that a step in flight still writes
        for another request.
        """
        for new in step.scheduled_new_reqs:
            self._blocks[new.req_id] = []
            self._give(new.req_id, new.block_ids[0])
        cached = step.scheduled_cached_reqs
        for key, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if key in cached.resumed_req_ids:
                self._blocks[key] = []
            if block_ids is not None:
                self._give(key, block_ids[0])

    def _give(self, key: str, block_ids: list[int]) -> None:
        self._blocks[key] += block_ids
        for _, _, written in self._in_flight:
            for other, blocks in written.items():
                if other != key and (both := blocks & set(block_ids)):
                    self.reused.append((key, other, both))

    def _written(self, step: Any) -> dict[str, set[int]]:
        """The blocks that the step writes, by request."""
        return {
            key: set(self._blocks[key][begin // BLOCK_SIZE : -(-end // BLOCK_SIZE)])
            for key, (begin, end) in computed_by(step).items()
        }


def computed_by(step: Any) -> dict[str, tuple[int, int]]:
    """For each request, the range of token positions that the step computes (the end is
    exclusive).
    """
    begins = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    cached = step.scheduled_cached_reqs
    begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    counts = step.num_scheduled_tokens
    return {key: (begins[key], begins[key] + count) for key, count in counts.items()}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    from transformers import LlamaConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    from pdmesh.engine.vllm.config import VllmConfig, engine_arguments
    from pdmesh.kv.tiers.config import TierConfig

    folder = tmp_path_factory.mktemp("tiny")
    architecture = LlamaConfig(
        num_hidden_layers=1, max_position_embeddings=256, architectures=["LlamaForCausalLM"]
    )
    architecture.save_pretrained(folder)
    ours = VllmConfig(
        "i0",
        1,
        folder,
        "tiny",
        block_size=BLOCK_SIZE,
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=STEP_TOKENS,
        tiers=TierConfig(host_pool_bytes=1 << 20),
    )
    arguments = engine_arguments(ours, Path(folder), "computed")
    arguments["kv_events_config"] = None
    made = AsyncEngineArgs(**arguments).create_engine_config()
    return lambda: made  # a function, because hypothesis cannot print vLLM's configuration


REQUESTS = st.lists(st.tuples(st.integers(1, 120), st.integers(1, 40)), min_size=1, max_size=8)


def run(
    engine: Engine, asked: list[tuple[int, int]], rng: random.Random, abort_share: float
) -> set[str]:
    """Run all requests to their ends. Returns the keys of the aborted requests."""
    todo = deque((f"r{n}", *each) for n, each in enumerate(asked))
    aborted: set[str] = set()
    num_turns = 0
    while todo or not engine.is_idle:
        num_turns += 1
        assert num_turns < 20_000, "it stands still"
        if todo and rng.random() < 0.3:
            engine.add(*todo.popleft())
        if engine.drawn and rng.random() < abort_share:
            key = rng.choice(sorted(engine.drawn))
            engine.abort(key)
            aborted.add(key)
        if engine.can_schedule:
            engine.schedule()
        elif engine.can_process:
            engine.process()
    return aborted


@pytest.mark.req("S116", "S141")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_begins_to_decode_is_given_no_placeholders_as_proposals(
    config: Callable[[], Any], is_async: bool
) -> None:
    """Only the prompt's last token is left to compute, as after a hand-over.

    On a CPU, the rank's kernel would use the placeholder -1 as an index.
    """
    from vllm.config import SpeculativeConfig

    made = copy.copy(config())
    made.speculative_config = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    engine = Engine(made, 40, is_async=is_async)
    engine.add("cached", 2 * BLOCK_SIZE + 1, 1)
    while not engine.is_idle:
        engine.schedule() if engine.can_schedule else engine.process()
    engine.add("later", 2 * BLOCK_SIZE + 1, 5, text_of="cached")
    step = engine.scheduler.schedule()
    assert step.num_scheduled_tokens == {"later": 1}
    assert not step.scheduled_spec_decode_tokens
    assert step.num_spec_tokens_to_schedule == 4


@pytest.mark.req("S141", "S142", "S148")
@settings(max_examples=25, deadline=None)
@given(asked=REQUESTS, seed=st.integers(0, 1 << 16), is_async=st.booleans())
def test_answers_names_and_blocks_are_those_of_a_synchronous_engine(
    config: Callable[[], Any], asked: list[tuple[int, int]], seed: int, is_async: bool
) -> None:
    rng = random.Random(seed)
    engine = Engine(config(), rng.choice((18, 40, 200)), is_async=is_async)
    aborted = run(engine, asked, rng, abort_share=rng.choice((0.0, 0.02)))
    for n, (num_prompt_tokens, max_tokens) in enumerate(asked):
        expected = answer(key := f"r{n}", num_prompt_tokens, max_tokens)
        if key in aborted and key not in engine.finished:
            assert engine.drawn[key] == expected[: len(engine.drawn[key])]
        else:
            assert engine.drawn[key] == expected
    names = {
        key: list(block_hashes(bytes.fromhex(SALT), list(request.all_token_ids), BLOCK_SIZE))
        for key, request in engine.requests.items()
    }
    assert all(names[key][index] == name for key, index, name in engine.saved)
    assert engine.reused == []
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "all but the null block"
    assert engine.scheduler._times.totals.most_ahead <= is_async


@pytest.mark.req("S148", "S149")
@pytest.mark.parametrize("is_async", [False, True])
def test_only_an_end_by_surprise_costs_a_token_past_it(
    config: Callable[[], Any], is_async: bool
) -> None:
    """The scheduler knows beforehand when `max_tokens` ends an answer, so such an answer costs no
    extra token.
    """
    stopping = next(n for n in range(1000) if len(answer(f"r{n}", 5, 30)) == 6)
    lasting = next(n for n in range(1000) if len(answer(f"r{n}", 5, 4)) == 4)
    for n, max_tokens, num_past_end in ((stopping, 30, 1), (lasting, 4, 0), (lasting, 1, 0)):
        engine = Engine(config(), 40, is_async=is_async)
        engine.add(f"r{n}", 5, max_tokens)
        while not engine.is_idle:
            engine.schedule() if engine.can_schedule else engine.process()
        past_end = engine.scheduler._times.totals.num_tokens_past_end
        assert past_end == (num_past_end if is_async else 0)


@pytest.mark.req("S148")
def test_a_block_is_given_on_only_after_the_step_that_writes_it(config: Callable[[], Any]) -> None:
    """Without vLLM's fence, the blocks of an aborted request are reused while a step in flight
    still writes them. This negative control removes the fence.
    """
    reused = []
    for is_fenced in (True, False):
        engine = Engine(config(), 12, is_async=True)
        engine.scheduler.defer_block_free &= is_fenced
        assert engine.scheduler.defer_block_free == is_fenced
        for n in range(6):
            engine.add(f"r{n}", 40, 20)
        for n in range(6):
            engine.schedule()
            engine.schedule() if engine.can_schedule else None
            engine.abort(f"r{n}")
            engine.process()
        while not engine.is_idle:
            engine.schedule() if engine.can_schedule else engine.process()
        reused.append(bool(engine.reused))
    assert reused == [False, True]
