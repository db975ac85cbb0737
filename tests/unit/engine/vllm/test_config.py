"""The arguments that vLLM gets, and when two engines may exchange blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.core.instance.async_scheduling import AsyncScheduling
from pdmesh.core.speculation.proposal_length import Speculation
from pdmesh.cores import usable_cores
from pdmesh.engine.base import (
    BlocksChanged,
    Failed,
    Finished,
    FinishReason,
    LandingFreed,
    Output,
    Prefilled,
    Tokens,
)
from pdmesh.engine.vllm.child.preflight import (
    RUNTIME_BYTES,
    available_bytes,
    check_memory,
    needed_bytes,
)
from pdmesh.engine.vllm.config import (
    VllmConfig,
    engine_seed,
    environment,
    lora_arguments,
    scheduler_class,
    thread_binding,
)
from pdmesh.engine.vllm.engine import VllmEngine
from pdmesh.engine.vllm.host.outputs import OutputQueue
from pdmesh.engine.vllm.model.fingerprint import computation_digest, cpu_kernels, digest
from pdmesh.engine.vllm.speculation.methods import speculative_config
from pdmesh.errors import EngineFailed

CPU = VllmConfig("prefill-0", 1, Path("model"), "m", device="cpu")
CUDA = replace(CPU, device="cuda")


def test_a_cpu_computes_eagerly_in_fp32_and_a_gpu_in_the_dtype_of_the_model() -> None:
    assert (CPU.effective_dtype, CPU.is_eager) == ("float32", True)
    assert (CUDA.effective_dtype, CUDA.is_eager) == ("auto", False)


@pytest.mark.req("S33")
def test_steps_are_bounded_on_a_cpu_and_as_vllm_chooses_on_a_gpu() -> None:
    assert (CPU.step_tokens, CUDA.step_tokens) == (512, 0)
    assert [replace(c, max_num_batched_tokens=64).step_tokens for c in (CPU, CUDA)] == [64, 64]
    assert replace(CPU, max_num_batched_tokens=4, max_num_seqs=16).step_tokens == 16


def test_the_users_environment_variables_are_kept() -> None:
    assert "OMP_NUM_THREADS" in environment(CPU, {})
    assert "OMP_NUM_THREADS" not in environment(CPU, {"OMP_NUM_THREADS": "7"})


def test_a_gpu_gets_no_setting_of_the_cpu_backend() -> None:
    assert environment(CUDA, {}).keys() < environment(CPU, {}).keys()
    assert environment(CUDA, {})["HF_HUB_OFFLINE"] == "1"


@pytest.mark.req("S118")
def test_vllm_gets_the_number_of_proposed_tokens_by_the_size_of_the_batch() -> None:
    told = speculative_config(Speculation(4, 0.6, 0.01), 256)
    schedule = told["num_speculative_tokens_per_batch_size"]
    assert schedule[0] == (1, 7, 4)
    assert schedule[-1] == (111, 256, 0)


ON = replace(CPU, async_scheduling=AsyncScheduling.ON)


@pytest.mark.req("S140", "S145")
def test_a_rank_that_computes_while_steps_are_scheduled_has_a_process_of_its_own_on_a_cpu() -> None:
    assert [c.scheduling.is_async for c in (CPU, ON)] == [False, True]
    assert [c.has_worker_process for c in (CPU, ON, replace(ON, device="cuda"))] == [
        False,
        True,
        False,
    ]
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(CPU, {})
    bound = environment(ON, {})
    # OMP_NUM_THREADS limits the threads to the share of cores
    assert bound["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert bound["OMP_NUM_THREADS"] == environment(CPU, {})["OMP_NUM_THREADS"]


@pytest.mark.req("S149")
def test_an_engine_without_a_landing_is_a_prefill_and_fusion_has_neither_arena() -> None:
    prefill = replace(CUDA, landing_bytes=0)
    decode = replace(CUDA, staging_bytes=0)
    fusion = replace(CUDA, staging_bytes=0, landing_bytes=0)
    assert [c.scheduling.is_async for c in (prefill, decode, fusion)] == [False, True, True]


def test_each_way_to_schedule_has_its_scheduler() -> None:
    proposes = replace(ON, speculation=Speculation(4, 0.6, 0.01))
    names = [scheduler_class(c).rpartition(".")[2] for c in (CPU, ON, proposes)]
    assert names == ["TimedScheduler", "TimedAsyncScheduler", "AdaptiveScheduler"]


def test_on_a_cpu_a_slot_stays_empty_for_rows_without_an_adapter() -> None:
    asked = replace(CPU, max_adapters=2, max_adapter_rank=20)
    told = lora_arguments(asked)
    assert (told["max_loras"], told["max_cpu_loras"], told["max_lora_rank"]) == (3, 3, 32)
    assert lora_arguments(replace(asked, device="cuda"))["max_loras"] == 2


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 100)
    return tmp_path


def test_everything_that_changes_what_is_computed_changes_its_digest() -> None:
    base = ("model", "float32", "0.32.0")
    variants = [base, ("other", *base[1:]), ("model", "bfloat16", "0.32.0"), (*base[:2], "0.33.0")]
    assert len({computation_digest(*v) for v in variants}) == len(variants)
    assert digest(["ab", "c"]) != digest(["a", "bc"])


def test_without_a_seed_each_engine_draws_from_a_seed_of_its_own() -> None:
    """With equal seeds, a decode would draw token 2 with the random numbers of token 1."""
    lives = [CPU, replace(CPU, instance_id="decode-0"), replace(CPU, incarnation=2)]
    assert len({engine_seed(life) for life in lives}) == len(lives)
    assert engine_seed(CPU) == engine_seed(replace(CPU)), (
        "all ranks of one engine have the same seed"
    )


@pytest.mark.req("S57")
def test_ranks_compute_on_cores_of_their_own_if_there_are_enough() -> None:
    assert thread_binding([0, 1], 2) == "0|1"
    assert thread_binding([2, 3, 6, 7, 9], 2) == "2,3|6,7"
    assert thread_binding([0], 2) == "nobind"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(CPU, {})
    two = environment(replace(CPU, tensor_parallel_size=2), {})
    assert two["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert two["VLLM_CPU_OMP_THREADS_BIND"] == thread_binding(usable_cores(), 2)


@pytest.mark.req("S120")
def test_stages_are_ranks_too() -> None:
    staged = replace(CPU, pipeline_parallel_size=2, async_scheduling=AsyncScheduling.ON)
    assert (staged.num_ranks, staged.has_worker_process) == (2, True)
    assert not staged.scheduling.is_async
    told = environment(staged, {})
    assert told["VLLM_CPU_OMP_THREADS_BIND"] == thread_binding(usable_cores(), 2)
    assert told["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert scheduler_class(staged).endswith("TimedScheduler")
    four = environment(replace(staged, tensor_parallel_size=2), {})
    assert four["VLLM_CPU_OMP_THREADS_BIND"] == thread_binding(usable_cores(), 4)


def test_the_instruction_sets_that_pack_kv_are_read_from_cpuinfo() -> None:
    text = "processor : 0\nflags\t\t: fpu sse2 avx2 avx512f amx_tile\nbugs : x\n"
    assert cpu_kernels(text) == "amx_tile avx2 avx512f"
    assert cpu_kernels("") == ""


def test_memory_is_checked_before_vllm_is_started(model_dir: Path) -> None:
    assert available_bytes("MemTotal: 9 kB\nMemAvailable:    2048 kB\n") == 2 << 20
    assert available_bytes("") is None
    assert needed_bytes(CPU, 100) == 200 + CPU.kv_cache_bytes + RUNTIME_BYTES
    four = replace(CPU, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert needed_bytes(four, 100) == 200 + 4 * (CPU.kv_cache_bytes + RUNTIME_BYTES)
    with pytest.raises(EngineFailed, match="lower kv_cache_bytes") as caught:
        check_memory(replace(CPU, model_dir=model_dir, kv_cache_bytes=1 << 60))
    assert caught.value.reason == "OUT_OF_MEMORY"


async def test_a_missing_model_ends_the_start_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    engine = VllmEngine(replace(CPU, model_dir=tmp_path))
    with pytest.raises(EngineFailed, match="no model in"):
        await engine.start()
    await engine.stop()


async def test_outputs_of_an_aborted_leg_are_dropped_but_its_ranges_are_not() -> None:
    queue = OutputQueue()
    changed = BlocksChanged((b"h",))
    queue.put([Tokens(1, [2]), LandingFreed(1), Finished(2, FinishReason.STOP), changed])
    queue.drop(1)
    batch = await anext(queue.batches())
    assert batch == [LandingFreed(1), Finished(2, FinishReason.STOP), changed]


@pytest.mark.fault("F27")
async def test_the_end_of_a_prefill_is_read_even_if_it_was_aborted() -> None:
    """No TicketClosed follows, so the host frees the staging range when it reads this end."""
    ends: list[Output] = [
        Prefilled(1, 7, None, 0, FinishReason.LENGTH),
        Failed(1, "KV_TRANSFER_FAILED", "the staged KV ended"),
    ]
    queue = OutputQueue()
    queue.put(ends)
    queue.drop(1)
    assert await anext(queue.batches()) == ends


async def test_output_before_the_death_of_the_engine_is_still_read() -> None:
    queue = OutputQueue()
    queue.put([Tokens(1, [2])])
    queue.fail(EngineFailed("dead"))
    queue.fail(EngineFailed("later"))
    batches = queue.batches()
    assert await anext(batches) == [Tokens(1, [2])]
    with pytest.raises(EngineFailed, match="dead"):
        await anext(batches)
