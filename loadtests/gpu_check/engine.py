"""Runs end-to-end tests of vLLM on this GPU, with prefill and decode apart.

The tests check equal answers, asynchronous scheduling, and latent attention (MLA). For MLA, vLLM
has other kernels on GPUs than on CPUs.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loadtests.gpu_check.finding import Finding

_LATENT = "tests/e2e/caches/test_latent.py"
TESTS = (
    "tests/e2e/engine/test_equality.py",
    "tests/e2e/engine/test_per_layer.py",
    "tests/e2e/steps/test_async_scheduling.py",
    f"{_LATENT}::test_latents_handed_over_give_the_outputs_of_plain_vllm",
    f"{_LATENT}::test_latents_handed_over_per_layer_give_the_outputs_of_plain_vllm",
)
WITHIN_S = 540
TITLE = "vLLM through prefill and decode"


def check() -> Finding:
    try:
        vllm = version("vllm")
    except PackageNotFoundError:
        return Finding(TITLE, "vLLM's CUDA build is not installed: make setup-cuda.", None)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not nightly", *TESTS]
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, check=False, timeout=WITHIN_S
        )
    except subprocess.TimeoutExpired:
        return Finding(TITLE, f"vLLM {vllm}: not over after {WITHIN_S} s.", False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    last = done.stdout.strip().rpartition("\n")[2]
    claim = f"vLLM {vllm}, {', '.join(TESTS)}: {last}. {' '.join(lines)}".rstrip()
    return Finding(TITLE, claim, done.returncode == 0)
