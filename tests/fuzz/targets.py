"""The targets of `make fuzz`. Each target is a module with `feed`, `honest` and `seeds`.

    make fuzz                                # all targets, one minute each
    make fuzz FUZZ_S=600                     # ten minutes each
    make fuzz FUZZ_TARGETS="json yaml"       # only these targets
    python -m tests.fuzz.targets TARGET...   # write the corpus of these targets again

`python -m tests.fuzz.kv_wire` writes the corpus of kv_wire.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

from tests.fuzz.budget import Budget

CORPUS: Final = Path(__file__).parent / "corpus"
MODULES: Final = {
    "kv_wire": "tests.fuzz.kv_wire",
    "http": "tests.fuzz.http_framing",
    "json": "tests.fuzz.json_schema",
    "grpc": "tests.fuzz.grpc_messages",
    "yaml": "tests.fuzz.yaml_file",
}


@dataclass(frozen=True)
class Target:
    feed: Callable[[bytes], None]
    max_len: int


def load(name: str) -> Target:
    """Load a target, with a limit on the work that an input may cause."""
    module = import_module(MODULES[name])
    return Target(Budget(module.feed, module.honest()), module.MAX_LEN)


def write_corpus(name: str) -> None:
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    for seed, data in import_module(MODULES[name]).seeds().items():
        (folder / seed).write_bytes(data)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        write_corpus(each)
