"""Reads the lengths of a trace's requests, from Mooncake's JSON lines or from an Azure table.

A Mooncake trace has the hashes of each prompt's blocks. A prompt's leading blocks count as cached
if earlier requests had the same blocks. This assumes that every instance has all earlier blocks.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from pdmesh.core.sizing.problem import SizingProblem
from pdmesh.core.sizing.traffic import BLOCK, RequestLengths, Traffic

MAX_SAMPLES: Final = 400
_MOONCAKE_BLOCK: Final = 512
_MAX_LINES: Final = 5_000_000


@dataclass(frozen=True, slots=True)
class _Line:
    at_s: float
    lengths: RequestLengths


def read_trace(path: Path) -> Traffic:
    """The trace's traffic, with the trace's own mean rate. Raises SizingProblem."""
    try:
        with path.open(newline="") as lines:
            read = _azure(lines) if path.suffix == ".csv" else _mooncake(lines)
            found = [line for line, _ in zip(read, range(_MAX_LINES), strict=False)]
    except (OSError, UnicodeDecodeError) as exc:
        raise SizingProblem("trace", f"cannot read {path}: {exc}") from exc
    except (KeyError, TypeError, ValueError) as exc:
        raise SizingProblem(
            "trace",
            f"{path} is neither Mooncake's JSON lines nor an Azure table: {exc!r}",
        ) from exc
    if len(found) < 2:
        raise SizingProblem("trace", f"{path} has fewer than two requests")
    lasted = found[-1].at_s - found[0].at_s
    if lasted <= 0:
        raise SizingProblem("trace", f"{path}: all requests come at one time")
    return Traffic(len(found) / lasted, _sample([line.lengths for line in found]))


def _sample(requests: Sequence[RequestLengths]) -> tuple[RequestLengths, ...]:
    """At most `MAX_SAMPLES` requests that represent all.

    The requests are sorted by their uncached tokens and divided into equal parts. The middle
    request of each part is taken.
    """
    ordered = sorted(requests, key=lambda r: (r.num_new, r.num_prompt, r.num_output))
    count = min(MAX_SAMPLES, len(ordered))
    return tuple(ordered[int((i + 0.5) * len(ordered) / count)] for i in range(count))


def _mooncake(lines: Iterator[str]) -> Iterator[_Line]:
    seen: set[int] = set()
    for line in lines:
        row: dict[str, Any] = json.loads(line)
        ids = row.get("hash_ids", [])
        num_held = next((i for i, each in enumerate(ids) if each not in seen), len(ids))
        seen.update(ids)
        num_prompt = int(row["input_length"])
        num_cached = min(num_held * _MOONCAKE_BLOCK, num_prompt - 1) // BLOCK * BLOCK
        yield _Line(
            float(row["timestamp"]) / 1000,
            _checked(num_prompt, num_cached, int(row["output_length"])),
        )


def _azure(lines: Iterator[str]) -> Iterator[_Line]:
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield _Line(at, _checked(int(row["ContextTokens"]), 0, int(row["GeneratedTokens"])))


def _checked(num_prompt: int, num_cached: int, num_output: int) -> RequestLengths:
    return RequestLengths(max(1, num_prompt), max(0, num_cached), max(1, num_output))
