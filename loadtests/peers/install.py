"""Installs other stacks (peers), each into its own environment, and compiles the programs in C.

The peers' packages need other versions of grpcio and protobuf than ours. The environments are made
once, in `.cache/peers`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loadtests.harness.generator import ROOT

PEERS_DIR: Final = ROOT / ".cache/peers"
NATIVE_DIR: Final = Path(__file__).parent / "native"
_INSTALL_S: Final = 1200.0
_SAID_CHARS: Final = 300


class Unavailable(Exception):
    """A peer cannot be measured on this machine. The message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Packages:
    """The packages of a peer.

    If there are `required` packages, `pinned` are installed without their own dependencies. Dynamo
    needs this. It depends on a package whose installation downloads from an index that is not
    public.
    """

    pinned: tuple[str, ...]
    required: tuple[str, ...] = ()


DYNAMO: Final = Packages(
    ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"),
    (
        "aiohttp>=3.14.3,<4",
        "certifi",
        "gguf",
        "jinja2",
        "kubernetes>=32.0.1,<33",
        "msgspec>=0.19",
        "numpy",
        "prometheus-client>=0.23.1,<1",
        "pydantic>=2.10.6,<=2.13.5",
        "pyzmq>=26",
        "redis>=6.2,<9",
        "sentencepiece",
        "tiktoken",
        "tqdm",
        "transformers>=4.56",
        "typing-extensions",
        "uvloop>=0.21",
        "zstandard<1,>=0.23",
    ),
)
SGLANG_ROUTER: Final = Packages(("sglang-router==0.3.2",))


def python_of(name: str, packages: Packages, folder: Path = PEERS_DIR) -> Path:
    """The interpreter of the peer's environment. The environment is made if it is missing or
    incomplete.

    Raises Unavailable if the installation fails.
    """
    home = folder / name
    python, done = home / "bin/python", home / "installed"
    told = "\n".join((*packages.pinned, *packages.required))
    if done.exists() and done.read_text() == told:
        return python
    shutil.rmtree(home, ignore_errors=True)
    print(f"installing {name} into {home}", file=sys.stderr, flush=True)
    _run(name, [sys.executable, "-m", "venv", str(home)])
    alone = ["--no-deps"] if packages.required else []
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    _run(name, [*pip, *alone, *packages.pinned])
    if packages.required:
        _run(name, [*pip, *packages.required])
    done.write_text(told)
    return python


def compiled(program: str, folder: Path = PEERS_DIR) -> Path:
    """The program of `native/PROGRAM.c`, compiled if its source is newer.

    Raises Unavailable if it cannot be compiled.
    """
    source, built = NATIVE_DIR / f"{program}.c", folder / "bin" / program
    if built.exists() and built.stat().st_mtime >= source.stat().st_mtime:
        return built
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Unavailable(f"{program}: there is no C compiler here (apt install gcc)")
    built.parent.mkdir(parents=True, exist_ok=True)
    _run(program, [compiler, "-O2", "-o", str(built), str(source)])
    return built


def _run(name: str, command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise Unavailable(f"{name}: {command[0]} took more than {_INSTALL_S:.0f} s") from exc
    if done.returncode:
        said = " ".join(done.stderr.split())[-_SAID_CHARS:] or f"exit status {done.returncode}"
        raise Unavailable(f"{name}: {said}")
