"""Run every section on this machine's GPU: `make gpu-check`, or `python -m loadtests.gpu_check`.

The checks need a GPU, torch, Triton and UCX. The last section also needs vLLM. Without vLLM, the
record says that this section did not run. All sections take a few minutes. The record goes to
`--out FILE`. The exit code is 2 without a GPU, and 1 if a section failed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import structlog

from loadtests.gpu_check.finding import Finding

log = structlog.get_logger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the record to this file (Markdown)")
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("no torch here, so no device to check", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked", file=sys.stderr)
        return 2
    pages, findings = [head(torch.cuda.get_device_name(), torch.__version__)], list[Finding]()
    print(pages[0], flush=True)
    for section in sections():
        found = carefully(section)
        findings += found
        for finding in found:
            pages.append(finding.page())
            print(pages[-1], flush=True)
        if arguments.out:
            arguments.out.write_text("\n".join(pages))
    return int(any(finding.is_right is False for finding in findings))


def head(device: str, torch_version: str) -> str:
    now = datetime.now(UTC).isoformat(timespec="minutes")
    return f"# The KV path on a GPU\n\n{device}, torch {torch_version}, {now}. `make gpu-check`.\n"


def sections() -> list[Callable[[], Sequence[Finding]]]:
    from loadtests.gpu_check import (
        beside_model,
        checksums,
        device_ops,
        draws,
        engine,
        exact,
        transfer,
    )

    return [
        lambda: [exact.check()],
        lambda: [checksums.check()],
        lambda: [draws.check()],
        beside_model.check,
        *(lambda kind=kind: [asyncio.run(transfer.check(kind))] for kind in transfer.MEMORIES),
        lambda: [device_ops.check()],
        lambda: [engine.check()],
    ]


def carefully(section: Callable[[], Sequence[Finding]]) -> Sequence[Finding]:
    """Run a section. If it raises, it has failed, and the other sections still run."""
    try:
        return section()
    except Exception as broken:
        log.exception("gpu_check.section_broke")
        return [Finding("A section broke", f"`{type(broken).__name__}: {broken}`", False)]


if __name__ == "__main__":
    sys.exit(main())
