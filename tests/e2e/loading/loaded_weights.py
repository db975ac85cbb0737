"""Writes digests of the weights that vLLM's ranks hold after a start, and some drawn tokens.

Usage: `python -m tests.e2e.loading.loaded_weights`. Arguments: model folder, loader (vllm or
file_order), number of ranks, draft folder or "", file of results. For each rank, the file gets the
SHA-256 of every weight in the form in which vLLM computes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pdmesh.core.loading.weights_loader import LoaderChoice
from pdmesh.cores import usable_cores
from pdmesh.engine.vllm.config import thread_binding
from pdmesh.engine.vllm.loading.choice import loader_arguments

PROMPT = [5, 17, 900, 23, 4000, 77]


def digests(worker: Any) -> dict[str, str]:
    """The digests of the model's weights and the draft's. This function runs in a worker."""
    from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

    found = compute_tensor_digests(worker.model_runner.get_model())
    drafter = getattr(worker.model_runner, "drafter", None)
    if drafter is not None:
        draft = compute_tensor_digests(drafter.model)
        found |= {f"draft.{name}": digest for name, digest in draft.items()}
    return dict(found)


def main() -> None:
    model, loader, num_ranks, draft, results = sys.argv[1:]
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # vLLM pickles `digests` for the workers
    }
    if int(num_ranks) > 1:
        cores = usable_cores()
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = thread_binding(cores, int(num_ranks))
    from vllm import LLM, SamplingParams

    further: dict[str, Any] = dict(loader_arguments(LoaderChoice(loader == "file_order", "")))
    if draft:
        further["speculative_config"] = {
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": 2,
        }
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        tensor_parallel_size=int(num_ranks),
        kv_cache_memory_bytes=64 << 20,
        max_model_len=256,
        max_num_seqs=2,
        skip_tokenizer_init=True,
        **further,
    )
    by_rank = llm.collective_rpc(digests)
    (output,) = llm.generate(
        [{"prompt_token_ids": PROMPT}],
        SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True),
        use_tqdm=False,
    )
    told = {"ranks": by_rank, "tokens": list(output.outputs[0].token_ids)}
    Path(results).write_text(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # vLLM does not always exit cleanly, and nothing is left to do


if __name__ == "__main__":
    main()
