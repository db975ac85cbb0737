"""Runs one vLLM engine with vLLM's own NixlConnector in a process.

A request is a line of JSON on stdin. Its answer is a line of JSON on the file descriptor OUT_FD.

    PYTHONPATH=<folder with nixl> python -m loadtests.handover.nixl_engine \
        MODEL_DIR SIDE_CHANNEL_PORT OUT_FD

A request has "prompt" (token ids), "max_tokens" and "params" (kv_transfer_params or null). An
answer has "tokens", "times" (when each token came, in seconds on the machine's monotonic clock),
"params" (for the other engine's request) and "num_cached" (prompt tokens that the engine did not
compute). The engine has the same settings as our own engine (`pdmesh.engine.vllm.config`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pdmesh.engine.vllm.config import MEMORY_SHARE, VllmConfig, environment


async def serve(config: VllmConfig, out: Any) -> None:
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(config.model_dir),
        skip_tokenizer_init=True,
        dtype=config.effective_dtype,
        enforce_eager=config.is_eager,
        block_size=config.block_size,
        gpu_memory_utilization=MEMORY_SHARE,
        kv_cache_memory_bytes=config.kv_cache_bytes,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        generation_config="vllm",
        disable_log_stats=True,
        distributed_executor_backend="uni",
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu"
        ),
    )
    engine = AsyncLLM.from_engine_args(arguments)
    print("ready", file=out, flush=True)
    ids = itertools.count()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        job = json.loads(line)
        sampling = SamplingParams(
            max_tokens=job["max_tokens"],
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": job["params"]} if job["params"] else None,
        )
        tokens: list[int] = []
        times: list[float] = []
        params, num_cached = None, 0
        prompt = {"prompt_token_ids": job["prompt"]}
        async for output in engine.generate(prompt, sampling, f"{os.getpid()}-{next(ids)}"):
            came = list(output.outputs[0].token_ids)[len(tokens) :]
            tokens += came
            times += [time.monotonic()] * len(came)
            params = output.kv_transfer_params or params
            num_cached = output.num_cached_tokens or num_cached
        answer = {"tokens": tokens, "times": times, "params": params, "num_cached": num_cached}
        print(json.dumps(answer), file=out, flush=True)
    engine.shutdown()


def main() -> None:
    model_dir, port, out_fd = sys.argv[1:]
    config = VllmConfig("nixl", 1, Path(model_dir), "default", block_size=64)
    os.environ |= environment(config, os.environ)
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = port
    asyncio.run(serve(config, os.fdopen(int(out_fd), "w")))


if __name__ == "__main__":
    main()
