"""Finds out from a processor's flags which settings the processor cannot run, or runs slowly.

So a bad setting is reported before vLLM fails. Only `own_flags` reads a file. If a machine's flags
cannot be read, nothing is refused, and vLLM itself reports what is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

CPUINFO: Final = Path("/proc/cpuinfo")
# The flags that torch, and so vLLM, means by AVX-512.
_AVX512: Final = frozenset({"avx512f", "avx512vl", "avx512bw", "avx512dq"})
_AMX: Final = "amx_tile"
_BF16: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last is Arm's


def flags_of(cpuinfo: str) -> frozenset[str]:
    """The flags of the first processor in the text of /proc/cpuinfo (`Features` on Arm)."""
    for line in cpuinfo.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def own_flags() -> frozenset[str]:
    """This machine's flags. Empty if they cannot be read."""
    try:
        return flags_of(CPUINFO.read_text())
    except OSError:
        return frozenset()


def missing_for(kv_cache_dtype: str, flags: frozenset[str]) -> str:
    """Why this processor cannot store KV in this format, in one line.

    Empty if it can, or if its flags are not known.
    """
    if not flags or not kv_cache_dtype.startswith("fp8") or _AMX in flags or flags >= _AVX512:
        return ""
    return (
        f"kv_cache_dtype {kv_cache_dtype} needs AVX-512 or AMX, and this processor has neither; "
        "use kv_cache_dtype auto"
    )


def slow_for(dtype: str, flags: frozenset[str]) -> str:
    """Why this processor computes slowly in `dtype`, in one line. Empty if it does not."""
    if not flags or dtype not in ("bfloat16", "auto") or flags & _BF16:
        return ""
    return (
        f"dtype {dtype} is slow here: this processor has no bf16 instructions (AVX-512 BF16 or "
        "AMX), so that each "
        "number is converted; float32 is several times as fast"
    )
