"""Digests of what decides the bytes of a KV block; `core.kv_format` makes one string of them.

The host binds the model and how it is run; the worker adds what its KV cache turned out to be, with the instruction
set where blocks are opaque, because vLLM's CPU kernels pack K and V by it.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path

from pdmesh.errors import EngineFailed

DIGEST_CHARS = 24
COMPUTATION_CHARS = 16
HASHED_HEAD_BYTES = 1 << 20


def digest(parts: Iterable[str]) -> str:
    """A hex digest of the parts in their order; no two lists of parts share one by concatenation."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:DIGEST_CHARS]


def model_digest(model_dir: Path) -> str:
    """Of config.json and of each weight file's name, size and first MiB (a safetensors header lies there).

    Raises EngineFailed if the directory is not that of a Hugging Face model.
    """
    config = model_dir / "config.json"
    try:
        parts = [json.dumps(json.loads(config.read_bytes()), sort_keys=True)]
        weights = sorted((*model_dir.glob("*.safetensors"), *model_dir.glob("*.bin")))
        for path in weights:
            with path.open("rb") as file:
                head = hashlib.sha256(file.read(HASHED_HEAD_BYTES)).hexdigest()
            parts.append(f"{path.name}:{path.stat().st_size}:{head}")
    except (OSError, ValueError) as error:
        raise EngineFailed(
            f"no model in {model_dir}: {error.__class__.__name__} at {config.name} or a weight file; "
            "prepare it with `make model`, or name a local Hugging Face directory with --model",
            reason="MODEL_MISSING",
        ) from error
    if not weights:
        raise EngineFailed(f"no weights in {model_dir}", reason="MODEL_MISSING")
    return digest(parts)


def computation_digest(model: str, dtype: str, vllm_version: str) -> str:
    """What the host knows of the KV's contents before the engine runs. `model` is `model_digest`."""
    return digest((model, dtype, vllm_version))[:COMPUTATION_CHARS]


def cpu_kernels(cpuinfo: str) -> str:
    """The instruction sets that decide how KV is packed, from the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        if line.startswith(("flags", "Features")):
            flags = line.split(":", 1)[-1].split()
            kinds = ("amx", "avx512", "avx2", "asimd", "sve", "bf16", "i8mm")
            return " ".join(sorted(f for f in flags if f.startswith(kinds)))
    return ""


def machine_kernels(device: str) -> str:
    """What decides the packing on this machine: the instruction sets of a CPU, nothing on a GPU."""
    if device != "cpu":
        return device
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""  # not Linux: the machine's name has to do
    return f"{platform.machine()} {cpu_kernels(cpuinfo)}"
