"""Decides how large and how complex a client's grammar may be.

A grammar may need any amount of time and memory to compile. The limits on bytes, symbols and fuel
count work, and not time. So every machine accepts the same grammars, and an engine can compile
every grammar that a gateway has accepted. Time and memory are bounded, too, in the process that
checks grammars for a gateway: if it reaches one of these bounds, the grammar is refused.
"""

from __future__ import annotations

from typing import Final

MAX_GRAMMAR_BYTES: Final = 256 << 10  # of a compiled constraint's text
MAX_SYMBOLS: Final = 50_000
MAX_FUEL: Final = 200_000  # of the compiler, to build the first automata
MAX_COMPILE_CPU_S: Final = 1
MAX_COMPILE_MEMORY: Final = 2 << 30  # bytes of address space
