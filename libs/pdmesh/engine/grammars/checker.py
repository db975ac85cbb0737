"""Checks clients' grammars for a gateway, in a separate process.

The gateway runs `python -m pdmesh.engine.grammars.checker`. The process compiles each grammar
within the time and memory of `core.sampling.grammar_limits`. If a grammar makes the process crash,
the gateway survives. The process reads frames from stdin, and answers each on stdout, in order.
"""

from __future__ import annotations

import contextlib
import os
import resource
import struct
import sys
from collections import OrderedDict
from typing import BinaryIO, Final

import msgspec

from pdmesh.core.sampling.grammar_limits import MAX_COMPILE_CPU_S, MAX_COMPILE_MEMORY
from pdmesh.engine.grammars.asked_grammars import AskedGrammar, grammar_of
from pdmesh.engine.grammars.compiler import GrammarCompiler, GrammarRefused
from pdmesh.engine.grammars.vocabulary import added_tokens, vocabulary_of

FRAME: Final = struct.Struct("!I")
MAX_VOCABULARIES: Final = 4  # if there are more, the least recently used one is dropped


class LoadVocabulary(msgspec.Struct, tag=True):
    """A vocabulary, to which later `Check` frames refer by `key`.

    The answer is an empty `Checked`, even if the vocabulary cannot be used. In that case, checks
    with this vocabulary are refused.
    """

    key: int
    tokenizer: msgspec.Raw  # tokenizer.json
    vocab_size: int
    eos_token: int


class Check(msgspec.Struct, tag=True):
    key: int
    asked: AskedGrammar


class Checked(msgspec.Struct):
    """The result of a check: a grammar for engines, or a refusal.

    `is_unknown` is set if the check's vocabulary is not loaded.
    """

    grammar: str = ""
    refusal: str = ""
    is_unknown: bool = False


_decoder: Final = msgspec.json.Decoder(LoadVocabulary | Check)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_COMPILE_MEMORY, MAX_COMPILE_MEMORY))
    os.nice(5)  # the gateway's event loop has priority
    serve(sys.stdin.buffer, sys.stdout.buffer)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    compilers: OrderedDict[int, tuple[GrammarCompiler, dict[str, int]]] = OrderedDict()
    while head := requests.read(FRAME.size):
        frame = _decoder.decode(requests.read(FRAME.unpack(head)[0]))
        if isinstance(frame, LoadVocabulary):
            compilers[frame.key] = _compiler(frame)
            if len(compilers) > MAX_VOCABULARIES:
                compilers.popitem(last=False)
            checked = Checked()
        elif (found := compilers.get(frame.key)) is not None:
            compilers.move_to_end(frame.key)
            checked = _checked(*found, frame.asked)
        else:
            checked = Checked(is_unknown=True)
        body = msgspec.json.encode(checked)
        answers.write(FRAME.pack(len(body)) + body)
        answers.flush()


def _compiler(load: LoadVocabulary) -> tuple[GrammarCompiler, dict[str, int]]:
    """The vocabulary's compiler, and the ids of its added tokens, by text.

    For an unusable vocabulary, there are no added tokens.
    """
    text, tokens = bytes(load.tokenizer).decode(), dict[str, int]()
    compiler = GrammarCompiler(lambda: vocabulary_of(text, load.vocab_size, load.eos_token))
    with contextlib.suppress(ValueError):  # each check with this vocabulary reports the problem
        _ = compiler.vocabulary
        tokens = added_tokens(text)
    return compiler, tokens


def _checked(compiler: GrammarCompiler, tokens: dict[str, int], asked: AskedGrammar) -> Checked:
    try:
        _ = compiler.vocabulary
    except ValueError:
        return Checked(refusal="constraints do not work with this model's kind of tokenizer")
    try:
        _bound_cpu()
        grammar = grammar_of(asked, tokens)
        compiler.matcher(grammar)
    except GrammarRefused as exc:
        return Checked(refusal=exc.message)
    except MemoryError:
        os.abort()  # earlier grammars may hold the memory, so later checks would fail as well
    finally:
        _unbound_cpu()
    return Checked(grammar=grammar)


def _bound_cpu() -> None:
    """Let the kernel kill this process if the check that begins uses too much CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + 1 + MAX_COMPILE_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


def _unbound_cpu() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
