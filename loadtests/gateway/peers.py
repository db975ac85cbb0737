"""Other serving stacks, measured on another, similar machine (2 cores, 2026-11-21), for
orientation.

Each had instant backends and one load generator in C; the least disturbed of several runs counts.
Numbers from different runs on shared machines differ by tens of percent: compare orders of
magnitude, not digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Dynamo 1.6.1 P/D relative to the aiohttp passthrough, both from PEERS 8. In such a ratio, load
# that slows the whole machine cancels out.
DYNAMO_REQUESTS: Final = 1.4 / 7.3
DYNAMO_TTFT: Final = 3.8 / 0.31
DYNAMO_TOKENS: Final = 61 / 168


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    requests_per_s: str  # all cores free / pinned to one core
    cpu_s_per_1k_requests: str
    latency_ms: str  # one connection, p50/p99
    stream_ttft_ms: str  # one stream, p50
    tokens_per_s: str  # 64 streams x 128 tokens, all cores free / one core
    cpu_s_per_1m_tokens: str


PEERS: Final = (
    Peer("aiohttp passthrough, 30 lines", "7.3k / 7.1k", "0.141", "0.37/0.51", "0.31",
        "168k / 198k", "3.4"),
    Peer("sglang-router 0.3.2, P/D round robin", "8.1k / 7.8k", "0.128", "0.24/0.41", "44.0",
        "202k / 125k", "5.8"),
    Peer("vllm-router 0.1.17, P/D round robin", "7.0k / 6.4k", "0.131", "0.10/0.86", "0.10",
        "162k / 177k", "5.4"),
    Peer("litellm 1.108.7", "74 / 77", "12.9", "12.8/19", "10.9", "1.6k / 1.6k", "632"),
    Peer("Dynamo 1.6.1 aggregated, KV router", "1.8k / 2.1k", "0.46", "1.35/4.8", "1.7 (p99 49)",
        "72k / 82k", "11.9"),
    Peer("Dynamo 1.6.1 P/D, KV router", "1.4k / 1.4k", "0.64", "2.0/5.3", "3.8 (p99 56)",
        "61k / 73k", "13.3"),
)  # fmt: skip
