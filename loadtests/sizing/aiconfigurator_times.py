"""Prints step times from aiconfigurator's tables of measured kernels, as JSON lines.

`python -m loadtests.sizing.fit` starts this program. It runs in the interpreter of a virtual
environment that has aiconfigurator (`pip install aiconfigurator==0.12.0`, Apache-2.0), not in ours.
Each line is one step of a vLLM engine. A step computes prompts, a batch of decodes, or both at
once.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

SYSTEMS = {
    "h100": "h100_sxm", "h200": "h200_sxm", "a100": "a100_sxm", "l40s": "l40s", "b200": "b200_sxm",
}  # fmt: skip
MODELS = (
    "meta-llama/Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-70B", "Qwen/Qwen3-8B",
    "Qwen/Qwen3-32B", "Qwen/Qwen3-32B-FP8-Static-PerTensor", "nvidia/Llama-3.1-70B-Instruct-FP8",
    "Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-30B-A3B-FP8",
    "Qwen/Qwen3-235B-A22B-FP8", "deepseek-ai/DeepSeek-V3",
)  # fmt: skip
PROMPTS = ((1, 256), (1, 1024), (1, 2048), (1, 4096), (1, 8192), (1, 16384), (4, 1024), (8, 1024))
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (512, 2048, 8192)
CHUNKS = (512, 2048, 8192)


def sessions(name: str, system: str, model_name: str) -> Iterator[tuple[int, Any]]:
    """A session for each number of tensor-parallel ranks in the tables."""
    from aiconfigurator.sdk.inference_session import InferenceSession
    from aiconfigurator_core.sdk import config, perf_database
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.models import get_model

    version = perf_database.get_latest_database_version(system, "vllm")
    database = perf_database.get_database(system, "vllm", version)
    for tp in (1, 2, 4, 8):
        experts = {"moe_tp_size": tp, "moe_ep_size": 1}
        try:
            model = get_model(model_name, config.ModelConfig(tp_size=tp, **experts), "vllm")
            yield tp, InferenceSession(model, database, get_backend("vllm"))
        except Exception as exc:  # noqa: BLE001  # a hole in their tables, whatever it is
            print(f"{name} {model_name} tp {tp}: {exc}"[:160], file=sys.stderr)


def steps(session: Any) -> Iterator[dict[str, Any]]:
    """Steps with their times in ms. `length` is that of a prompt, or of each decode's context."""
    from aiconfigurator_core.sdk.config import RuntimeConfig
    from aiconfigurator_core.sdk.step_estimate import MixedStepInput

    def runtime(batch: int, length: int) -> Any:
        return RuntimeConfig(batch_size=batch, isl=length, osl=2, beam_width=1)

    for batch, length in PROMPTS:
        ms = session.run_static_latency_only(runtime(batch, length), "static_ctx")
        yield {"kind": "prefill", "batch": batch, "length": length, "ms": ms}
    for batch in BATCHES:
        for length in CONTEXTS:
            ms = session.run_static_latency_only(runtime(batch, length), "static_gen")
            yield {"kind": "decode", "batch": batch, "length": length, "ms": ms}
    for chunk in CHUNKS:
        for batch in (16, 64, 128):
            step = session.run_mixed(runtime(batch, 2048), MixedStepInput(chunk, batch))
            yield {
                "kind": "mixed", "batch": batch, "length": 2048, "chunk": chunk,
                "ms": step.latency_ms,
            }  # fmt: skip


def config_of(model_name: str) -> dict[str, Any]:
    """The model's config.json, which the package has beside its tables."""
    from pathlib import Path

    import aiconfigurator_core

    folder = Path(aiconfigurator_core.__file__).parent / "model_configs"
    stem = model_name.replace("/", "--")
    config: dict[str, Any] = json.loads((folder / f"{stem}_config.json").read_text())
    if (quantised := folder / f"{stem}_hf_quant_config.json").exists():
        own = json.loads(quantised.read_text())["quantization"]
        config["quantization_config"] = {"quant_method": "modelopt", **own}
    return config


def main() -> None:
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    for model_name in MODELS:
        print(json.dumps({"model": model_name, "config": config_of(model_name)}), flush=True)
    for name, system in SYSTEMS.items():
        for model_name in MODELS:
            for tp, session in sessions(name, system, model_name):
                try:
                    for step in steps(session):
                        told = {"gpu": name, "model": model_name, "tp": tp, **step}
                        print(json.dumps(told), flush=True)
                except Exception as exc:  # noqa: BLE001  # likewise
                    print(f"{name} {model_name} tp {tp}: {exc}"[:160], file=sys.stderr)


if __name__ == "__main__":
    main()
