"""Computes the parts of a fingerprint, which two engines must have in common to exchange KV.

`core.kv.layout.compatibility` joins the parts into one string. The instance's process contributes
the model's files and how the model is run. The worker adds the settings that vLLM derived
(`kv_facts`) and the layout of its KV cache. On a CPU, the layout includes the instruction sets,
because vLLM's CPU kernels pack K and V differently for each of them. Opaque blocks have an unknown
inner layout. On a GPU, their layout includes the name of the GPU.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from pathlib import Path

from pdmesh.core.groups.kv_options import kv_identity
from pdmesh.core.instance.engine_args import EngineArgs

DIGEST_CHARS = 24
COMPUTATION_CHARS = 16


def digest(parts: Iterable[str]) -> str:
    """A hex digest of the parts in order. Different lists of parts give different bytes to hash."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:DIGEST_CHARS]


def computation_digest(
    model: str, dtype: str, vllm_version: str, engine_args: EngineArgs | None = None
) -> str:
    """A digest of everything that decides the KV's contents and is known before the engine runs.

    `model` is `ModelFiles.digest`.
    """
    extra = kv_identity(engine_args or {})
    parts = (model, dtype, vllm_version, *((extra,) if extra else ()))
    return digest(parts)[:COMPUTATION_CHARS]


def cpu_kernels(cpuinfo: str) -> str:
    """The instruction sets that decide how KV is packed, from the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        if line.startswith(("flags", "Features")):
            flags = line.split(":", 1)[-1].split()
            kinds = ("amx", "avx512", "avx2", "asimd", "sve", "bf16", "i8mm")
            return " ".join(sorted(f for f in flags if f.startswith(kinds)))
    return ""


def machine_kernels(device: str) -> str:
    """Names what decides KV's packing: a CPU's instruction sets, or the GPU in `device`."""
    if device != "cpu":
        return device
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""  # this is not Linux: only the kind of machine is known
    return f"{platform.machine()} {cpu_kernels(cpuinfo)}"
