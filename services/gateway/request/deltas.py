"""Reads the output of a call's choices (answers): all at once, or piece by piece as a stream.

If the output may have reasoning or tool calls, it is parsed here. Every API that generates text
takes its answers from this module, so that the same call gets the same answer over each API.
"""

from __future__ import annotations

from msgspec.structs import replace

from pdmesh.errors import MeshError
from pdmesh.services.gateway.parsing.answer_parsing import CallParser
from pdmesh.services.gateway.request.frontend import Call
from pdmesh.services.gateway.text.choice_text import TextDelta


class ClientDisconnected(Exception):
    """The client has disconnected, so there is no answer to send."""


class AnswerStream:
    """The new output of a call's choices, until all of them have ended.

    `failure` is the error of the first choice that failed. The caller writes the output that `news`
    returned, and raises `failure` afterwards.
    """

    __slots__ = ("_call", "_parser", "failure", "num_open")

    def __init__(self, call: Call) -> None:
        self._call = call
        self.num_open = len(call.generations)
        self._parser = _parser_of(call, is_whole=False)
        self.failure: Exception | None = None

    async def news(self) -> list[TextDelta]:
        """Wait for output and return it. Raises InvalidRequest, ParserFailed, ParserUnavailable."""
        await self._call.changed()
        taken = self._call.take()
        shown = taken if self._parser is None else await self._parser.parsed(taken)
        for delta in taken:
            if delta.is_last and delta.finish_reason is None:
                self.failure = self.failure or _failure(delta)
        if self.failure is not None:
            shown = [_without_a_bad_end(delta) for delta in shown]
        for delta in shown:
            self.num_open -= delta.is_last
            self._call.num_reasoning_tokens += delta.num_reasoning_tokens
        return shown

    def close(self) -> None:
        """Close the parser, and forget the failure, whose traceback refers to this stream."""
        self.failure = None
        if self._parser is not None:
            self._parser.close()


async def whole_text(call: Call) -> list[TextDelta]:
    """The whole output of each choice.

    Raises the error of a choice that failed, ClientDisconnected, or an error of the parsers.
    """
    deltas = await _whole_choices(call)
    parser = _parser_of(call, is_whole=True)
    if parser is None:
        return deltas
    try:
        deltas = await parser.parsed(deltas)
    finally:
        parser.close()
    call.num_reasoning_tokens = sum(delta.num_reasoning_tokens for delta in deltas)
    return deltas


def _parser_of(call: Call, *, is_whole: bool) -> CallParser | None:
    spec = call.spec
    if spec.parsing is None:
        return None
    prompts = [generation.prompt.tokens for generation in call.generations]
    return spec.parsing.begin(prompts, spec.text_rules, is_whole=is_whole)


async def _whole_choices(call: Call) -> list[TextDelta]:
    parts: list[list[TextDelta]] = [[] for _ in call.generations]
    num_open = len(parts)
    while num_open:
        await call.changed()
        for delta in call.take():
            parts[delta.index].append(delta)
            num_open -= delta.is_last
            if delta.is_last and delta.finish_reason is None:
                call.is_void = delta.error is not None
                raise _failure(delta)
    return [_joined(pieces) for pieces in parts]


def _failure(delta: TextDelta) -> MeshError | ClientDisconnected:
    return delta.error if delta.error is not None else ClientDisconnected()


def _without_a_bad_end(delta: TextDelta) -> TextDelta:
    """If the delta ends a failed choice, remove its error and its mark as the last delta."""
    is_bad = delta.is_last and delta.finish_reason is None
    return replace(delta, is_last=False, error=None) if is_bad else delta


def _joined(pieces: list[TextDelta]) -> TextDelta:
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1]
    return replace(
        last,
        text="".join(p.text for p in pieces),
        token_ids=[t for p in pieces for t in p.token_ids],
        logprobs=[lp for p in pieces for lp in p.logprobs],
        prompt_logprobs=next((p.prompt_logprobs for p in pieces if p.prompt_logprobs), None),
    )
