"""Limits how large and how complex a client's grammar may be.

Compiling a grammar may need any amount of time and memory. The limits on bytes, symbols and fuel
count work instead of time. So every machine accepts the same grammars, and an engine can compile
every grammar that a gateway has accepted. Each gateway also limits the time and memory of the
process that checks grammars. If the process reaches such a limit, the grammar is refused.
"""

from __future__ import annotations

from typing import Final

MAX_GRAMMAR_BYTES: Final = 256 << 10  # bytes of the grammar's text in llguidance's syntax
MAX_SYMBOLS: Final = 50_000
MAX_FUEL: Final = 200_000  # work of the compiler, in its own units, to build the first automata
MAX_COMPILE_CPU_S: Final = 1
MAX_COMPILE_MEMORY: Final = 2 << 30  # bytes of address space
