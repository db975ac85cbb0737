"""How much time each KV tier saves: time to first token with a prompt's blocks in the tier, or
computed; and copy speed.

    python -m loadtests.kv.tiers                  needs vLLM and the prepared model (make model)

A tier is a place for KV below the engine: the host pool, or files. vLLM engines run one after the
other in child processes, with one prompt at a time. A round sends three prompts, and sends them
again while the engine holds their blocks. Then other prompts push the blocks out, and the three
prompts are sent once more. Files are read from the page cache, except in rows marked cold. For
these rows, the kernel drops the files from the cache first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np

from loadtests.gateway.report import table
from loadtests.harness.generator import ROOT
from loadtests.harness.results import describe_machine, describe_versions
from pdmesh.core.kv.prefix.block_hash import block_hashes, tenant_root
from pdmesh.engine.base import Prefilled, PrefillJob, Sampling, TiersReported
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.engine.vllm.engine import VllmEngine
from pdmesh.kv.device.scatter import gather, recv_scatter
from pdmesh.kv.tiers.config import TierConfig
from pdmesh.kv.tiers.file_format import checksum_of, identity_of
from pdmesh.kv.tiers.file_store import FileStore
from pdmesh.kv.tiers.host_pool import HostPool
from pdmesh.kv.transport.base import ByteArray

MODEL: Final = ROOT / ".cache/models/SmolLM2-135M-Instruct"
LENGTHS: Final = (128, 512, 2000)
BLOCK_SIZE: Final = 64
_KV_BYTES: Final = 150 << 20  # room for three prompts, but not for those that push them out as well
_FILLERS: Final = (1900, 1900)
_OWNER: Final = bytes(8)


@dataclass(slots=True)
class Results:
    """The results: TTFT in ms by place of the blocks and prompt length, GiB/s by operation."""

    ttft_ms: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    gib_per_s: dict[str, list[float]] = field(default_factory=dict)
    machine: str = field(default_factory=describe_machine)
    versions: dict[str, str] = field(default_factory=describe_versions)
    taken_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def add(self, where: str, length: int, seconds: float) -> None:
        self.ttft_ms.setdefault(where, {}).setdefault(length, []).append(1e3 * seconds)


class Driver:
    """Sends one prompt at a time to one engine."""

    def __init__(self, engine: VllmEngine, fingerprint: str) -> None:
        self._engine = engine
        self._root = tenant_root(b"bench", "default", "tiers", fingerprint)
        self._firsts: asyncio.Queue[Prefilled] = asyncio.Queue()
        self._leg = 0
        self.served: dict[str, int] = {}

    async def follow(self) -> None:
        async for outputs in self._engine.outputs():
            for output in outputs:
                match output:
                    case Prefilled():
                        self._firsts.put_nowait(output)
                    case TiersReported():
                        for (tier, event), count in output.report.counts.items():
                            if event == "served":
                                self.served[tier] = self.served.get(tier, 0) + count

    async def ttft(self, prompt: Sequence[int]) -> float:
        self._leg += 1
        names = tuple(block_hashes(self._root, prompt, BLOCK_SIZE))
        started = time.perf_counter()
        self._engine.prefill(
            PrefillJob(
                self._leg,
                f"r{self._leg}",
                0,
                array("I", prompt),
                Sampling(max_tokens=1),
                cache_salt=self._root.hex(),
                block_hashes=names,
            )
        )
        await self._firsts.get()
        return time.perf_counter() - started


async def run_engine(
    results: Results, label: str, tiers: TierConfig, rounds: int, *, is_cold: bool = False
) -> None:
    """Measure one engine. `label` names the tier from which pushed-out prompts must come."""
    config = VllmConfig(
        f"bench-{label.replace(' ', '-')}",
        1,
        MODEL,
        "smollm2",
        block_size=BLOCK_SIZE,
        kv_cache_bytes=_KV_BYTES,
        staging_bytes=0,
        landing_bytes=0,
        tiers=tiers,
    )
    engine = VllmEngine(config)
    info = await engine.start()
    driver = Driver(engine, info.model_fingerprint)
    following = asyncio.create_task(driver.follow())
    rng = random.Random(17)
    try:
        await driver.ttft(_prompt(rng, 256))  # warm-up
        for _ in range(rounds):
            prompts = [_prompt(rng, length) for length in LENGTHS]
            for prompt in prompts:
                seconds = await driver.ttft(prompt)
                results.add(f"computed ({label})", len(prompt), seconds)
            for prompt in reversed(prompts):
                results.add(f"in the engine ({label})", len(prompt), await driver.ttft(prompt))
            for length in _FILLERS:
                await driver.ttft(_prompt(rng, length))
            if is_cold:
                _drop_from_page_cache(Path(tiers.file_store_dir))
            for prompt in prompts:
                results.add(label, len(prompt), await driver.ttft(prompt))
        await asyncio.sleep(0.2)  # until the engine has sent its last report
        for tier, count in driver.served.items():
            results.served[f"{label}: {tier}"] = count
    finally:
        following.cancel()
        await engine.stop()


def _prompt(rng: random.Random, length: int) -> list[int]:
    return rng.choices(range(1000, 40000), k=length)


def _drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_memory(results: Results, folder: Path, rounds: int = 5) -> None:
    """Measure the speed of the pool's and the store's copies, and of a plain memcpy.

    Blocks have the size of SmolLM2's (30 layers of 96 KiB).
    """
    num_layers, layer_bytes, count = 30, 98304, 24
    block_bytes = num_layers * layer_bytes
    caches = [
        np.random.default_rng(i).integers(0, 256, (64, layer_bytes), np.uint8)
        for i in range(num_layers)
    ]
    ids = random.Random(3).sample(range(64), count)
    names = [n.to_bytes(16, "big") for n in range(count)]
    plain = np.empty((count, block_bytes), np.uint8)
    source = np.ones_like(plain)
    store = FileStore(folder, identity_of("bench", 0, 1), block_bytes, 1 << 34, time.time)
    pool = HostPool(2 * count * block_bytes, block_bytes)
    for number in range(rounds + 1):
        timed = _Timed(count * block_bytes)
        with timed("memcpy"):
            np.copyto(plain, source)
        with timed("engine to pool, checksum included"):
            for name, block in zip(names, ids, strict=True):
                pool.put(name, _OWNER, _gatherer(caches, block))
        pinned = pool.pin(names)
        with timed("pool to engine"):
            for held, block in zip(pinned, ids, strict=True):
                recv_scatter(held.data, caches, [block])
        with timed("checksum"):
            for held in pinned:
                checksum_of(held.data)
        with timed("write files (page cache)"):
            for held in pinned:
                store.put(held.name, _OWNER, held.data, held.checksum)
        with timed("read files (page cache), verified"):
            for row, name in zip(plain, names, strict=True):
                assert store.get(name, _OWNER, row) is not None
        for name in names:
            store.delete(name, _OWNER)
        pool.unpin(names)
        pool.clear()
        if number:  # the first round touches new memory
            for what, speed in timed.gib_per_s.items():
                results.gib_per_s.setdefault(what, []).append(speed)


def _gatherer(caches: Sequence[ByteArray], block: int) -> Callable[[ByteArray], None]:
    def write(out: ByteArray) -> None:
        gather(caches, [block], out)

    return write


@dataclass(slots=True)
class _Timed:
    num_bytes: int
    gib_per_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.gib_per_s[what] = self.num_bytes / (time.perf_counter() - started) / 2**30


def as_markdown(results: Results, command: str) -> str:
    def cell(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"

    ttft = [
        [where, *(cell(by_length[length]) for length in LENGTHS)]
        for where, by_length in results.ttft_ms.items()
    ]
    speed = [[what, cell(values)] for what, values in results.gib_per_s.items()]
    served = ", ".join(f"{what} {count}" for what, count in results.served.items())
    return "\n\n".join(
        [
            f"# KV tiers, {results.taken_at[:10]}",
            (
                f"`{command}` on {results.machine}. SmolLM2-135M in fp32 on vLLM's CPU build, "
                "blocks of"
                f" {BLOCK_SIZE} tokens (2.8 MiB). Median (least-most) of the rounds."
            ),
            "## Time to first token, ms, by where the prompt's blocks were",
            table(["blocks", *(f"{length} tokens" for length in LENGTHS)], ttft),
            f"Blocks served instead of computed, by engine and tier: {served}.",
            "## Copies, GiB/s",
            table(["operation", "GiB/s"], speed),
        ]
    )


async def run(rounds: int, folder: Path) -> Results:
    results = Results()
    measure_memory(results, folder / "copies")
    pool = TierConfig(host_pool_bytes=1 << 30, timeout_s=5.0)
    small = replace(
        pool, host_pool_bytes=150 << 20, file_store_dir=str(folder), file_store_bytes=4 << 30
    )
    await run_engine(results, "no tiers", TierConfig(), rounds)
    await run_engine(results, "host pool", pool, rounds)
    await run_engine(results, "file store", small, rounds)
    cold = replace(small, file_store_dir=str(folder / "cold"))
    await run_engine(results, "file store, cold", cold, rounds, is_cold=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "loadtests/results")
    args = parser.parse_args()
    # this program may use all cores
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(run(args.rounds, Path(folder)))
    stem = args.out / f"kv-tiers-{results.taken_at[:10]}"
    stem.with_suffix(".json").write_text(json.dumps(asdict(results), indent=1) + "\n")
    command = f"python -m loadtests.kv.tiers --rounds {args.rounds}"
    stem.with_suffix(".md").write_text(as_markdown(results, command) + "\n")
    print(as_markdown(results, command))


if __name__ == "__main__":
    main()
