"""Runs atheris on one of `targets`, for `make fuzz`.

atheris is not a development package. Arguments after the target's name are for libFuzzer.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["pdmesh", "uvicorn.protocols"]):
    from tests.fuzz import targets

    name = sys.argv.pop(1)
    target = targets.load(name)

# libFuzzer finds recursion and memory problems. An input that takes 60 s counts as a hang.
sys.argv += [
    f"-max_len={target.max_len}",
    "-timeout=60",
    "-rss_limit_mb=2048",
    "-print_final_stats=1",
]
atheris.Setup(sys.argv, target.feed)
atheris.Fuzz()
