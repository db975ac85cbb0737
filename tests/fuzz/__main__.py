"""`make fuzz`: atheris drives one of `targets`.

It is not among the development packages; arguments after the target's name are libFuzzer's.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["pdmesh", "uvicorn.protocols"]):
    from tests.fuzz import targets

    name = sys.argv.pop(1)
    target = targets.load(name)

# Recursion and memory are libFuzzer's to find; 60 s without an end is a hang.
sys.argv += [
    f"-max_len={target.max_len}",
    "-timeout=60",
    "-rss_limit_mb=2048",
    "-print_final_stats=1",
]
atheris.Setup(sys.argv, target.feed)
atheris.Fuzz()
