"""How large a part of a pull should be: `python -m loadtests.kv_bench.chunks [ROUNDS]` prints
medians (lowest) in ms.

`core.kv.transfer.pull_parts` has the sizes that were chosen by this measurement.
"""

from __future__ import annotations

import statistics
import sys
from typing import Final

from loadtests.kv_bench import cases
from loadtests.kv_bench.pair import TRANSPORTS, pair

_SIZES: Final = (4, 16, 64)  # MiB
_CHUNKS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)  # KiB
_MODES: Final = (cases.CHUNKED, cases.LAYERS)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    print(f"| transport | mode | MiB | {' | '.join(f'{c} KiB' for c in _CHUNKS)} |")
    print("|---" * (3 + len(_CHUNKS)) + "|")
    for transport in TRANSPORTS:
        with pair(transport, max(_SIZES) << 20) as both:
            for mode in _MODES:
                for mib in _SIZES:
                    took: dict[int, list[float]] = {chunk: [] for chunk in _CHUNKS}
                    for _ in range(rounds):
                        for chunk in _CHUNKS:
                            sample = both.run(mode, mib << 20, chunk_bytes=chunk << 10)
                            took[chunk].append(sample.total_ms)
                    cells = [f"{statistics.median(t):.2f} ({min(t):.2f})" for t in took.values()]
                    print(f"| {transport} | {mode} | {mib} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
