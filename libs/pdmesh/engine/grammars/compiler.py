"""Compiles grammars to matchers, at gateways and engines.

A matcher follows an answer and computes which tokens may come next. `core.sampling.grammar_limits`
bounds the size of a grammar.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from pdmesh.core.sampling.grammar_limits import MAX_FUEL, MAX_SYMBOLS
from pdmesh.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_KEPT: Final = 32  # compiled grammars
_MAX_EXPLAINED: Final = 300  # characters of a compiler's message


class GrammarRefused(InvalidRequest):
    """The grammar cannot be compiled. The message is for the client that wrote the grammar."""

    default_reason = "GRAMMAR_REFUSED"


class GrammarCompiler:
    """Compiles grammars for one vocabulary. `load` reads the vocabulary on its first use.

    Threads may share a compiler.
    """

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        self._load = load
        self._vocabulary: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._keeping = threading.Lock()

    @property
    def vocabulary(self) -> LLTokenizer:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher that is at the beginning of an answer. Raises GrammarRefused.

        The `MAX_KEPT` grammars that were used last stay compiled. For these, the call only copies a
        matcher, which takes some microseconds.
        """
        name = hashlib.blake2b(grammar.encode(errors="replace"), digest_size=16).digest()
        with self._keeping:
            if (kept := self._kept.get(name)) is not None:
                self._kept.move_to_end(name)
                return kept.deep_copy()
        compiled = self._compile(grammar)
        with self._keeping:
            self._kept[name] = compiled
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return compiled.deep_copy()

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self.vocabulary, grammar, log_level=0, limits=_limits())
        probe = matcher.deep_copy()
        if not probe.is_error():
            # Only the first bitmask shows whether a grammar grows without bound or allows no token.
            probe.compute_bitmask()
        if probe.is_error():
            raise GrammarRefused(_explained(probe.get_error()))
        return matcher


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=MAX_FUEL, max_grammar_size=MAX_SYMBOLS, verbose_errors=False
    )


def _explained(error: str) -> str:
    """The library's message in one line, shortened, or a message of ours for two known errors."""
    if error.startswith("panic"):
        return "the grammar is too large or too complex"
    if "NoExtensionBias" in error:
        return "the grammar allows no answer"
    return " ".join(error.removesuffix(" <non-verbose/>").split())[:_MAX_EXPLAINED]
