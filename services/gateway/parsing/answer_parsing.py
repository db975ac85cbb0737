"""Splits the answers to a call into reasoning, text and tool calls, while the tokens arrive.

vLLM's parsers do this in a separate process. A call has one or more answers, its choices. The state
of a parser depends only on the tokens of its choice, not on the instance that drew them. If the
parser process dies, a new process gets the same tokens again. Findings that were already reported
are not reported again.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import msgspec
import structlog
from msgspec.structs import replace

from pdmesh.core.kv.prefix.block_hash import tokens_to_bytes
from pdmesh.core.sampling.thinking_budget import ThinkingMarks
from pdmesh.engine.grammars.asked_grammars import AskedGrammar
from pdmesh.errors import InvalidRequest, MeshError
from pdmesh.services.gateway.parsing.frames import (
    AskMarks,
    FeedAnswer,
    LoadParsers,
    MarksFound,
    OpenAnswer,
    ParsedPiece,
    ParsedTokens,
    ParserReply,
    ParsingFailed,
    PrepareAnswer,
    PreparedAnswer,
)
from pdmesh.services.gateway.parsing.parser_choice import NONE, ParserNames, parser_names
from pdmesh.services.gateway.parsing.parser_process import ParserLife, ParserLost, ParserProcess
from pdmesh.services.gateway.text.choice_text import TextDelta, ToolCallDelta
from pdmesh.services.gateway.text.text_stream import TextRules
from pdmesh.services.gateway.text.tokenizer import Tokenizer

log = structlog.get_logger(__name__)

# The number of tokens to feed at once. A new process gets all tokens of a long answer, and the time
# of some parsers grows with the square of the answer's length. The tokens are fed in pieces, so
# that other choices are served in between and each piece has its own time limit.
_PIECE: Final = 64
_MAX_DEATHS: Final = 2  # deaths of the parser process over the same choice or request
_choices: Final = itertools.count(1)
_PLAIN_CHAT: Final = msgspec.json.encode(
    {"model": "", "messages": [{"role": "user", "content": ""}], "tool_choice": "none"}
)


class ParserFailed(MeshError):
    default_reason = "PARSER_FAILED"


class UnusableParsers(InvalidRequest):
    """The model's parsers cannot be loaded, for example because its tokenizer lacks tokens."""

    default_reason = "UNSUPPORTED_FIELD"


class ParsedModel(msgspec.Struct, frozen=True):
    """A model's parsers. `key` is their name in the parser process."""

    key: str
    names: ParserNames
    tokenizer: Tokenizer

    def load(self) -> LoadParsers:
        marks = self.tokenizer.marks
        return LoadParsers(
            self.key,
            self.tokenizer.to_json(),
            dict(marks.special_tokens),
            marks.model_type,
            self.names.tool,
            self.names.reasoning,
        )


@dataclass(frozen=True, slots=True)
class Parsing:
    """How a call's answers are parsed.

    `request` is the part of the call's request that the parsers read. With `shows_special`, the
    parsers also read the text of special tokens. With `is_named`, the client has named the one tool
    to call.
    """

    parsers: AnswerParsers
    model: ParsedModel
    request: bytes
    shows_special: bool = False
    is_named: bool = False
    begins_after: tuple[int, ...] = ()  # the tokens after which a constraint on the answers begins
    calls: AskedGrammar | None = None  # the form that tool calls must have

    def begin(
        self, prompts: Sequence[array[int]], rules: TextRules, *, is_whole: bool
    ) -> CallParser:
        """Begin to parse the call's answers. `prompts` has the prompt of each choice."""
        opens = [
            OpenAnswer(
                next(_choices),
                self.model.key,
                self.request,
                tokens_to_bytes(prompt),
                is_whole,
                tuple(rules.stops),
                rules.min_tokens,
                rules.is_stop_shown,
                rules.are_special_shown,
                sorted(rules.end_ids),
            )
            for prompt in prompts
        ]
        return CallParser(self, opens)


class AnswerParsers:
    """The parsers of all models.

    `tool_parser` and `reasoning_parser` are settings: a parser's name, auto or none.
    """

    def __init__(self, tool_parser: str, reasoning_parser: str, process: ParserProcess) -> None:
        self._settings = (tool_parser, reasoning_parser)
        self._process = process
        self._known: WeakKeyDictionary[Tokenizer, tuple[str, ParserNames]] = WeakKeyDictionary()
        self._marks: WeakKeyDictionary[Tokenizer, ThinkingMarks] = WeakKeyDictionary()
        self._keys = itertools.count(1)

    def model(self, tokenizer: Tokenizer) -> ParsedModel:
        found = self._known.get(tokenizer)
        if found is None:
            names = parser_names(tokenizer.marks, *self._settings)
            found = f"{next(self._keys)}", names
            self._known[tokenizer] = found
        return ParsedModel(*found, tokenizer)

    def may_be_needed(self, *, for_tools: bool) -> bool:
        """Whether the settings allow a reasoning parser, or with `for_tools` a tool parser."""
        tool, reasoning = self._settings
        return reasoning != NONE or (for_tools and tool != NONE)

    def is_needed(self, tokenizer: Tokenizer, *, for_tools: bool) -> bool:
        """Whether the model has a reasoning parser, or with `for_tools` a tool parser."""
        names = self.model(tokenizer).names
        return bool(names.reasoning or (for_tools and names.tool))

    async def warm_up(self, tokenizer: Tokenizer) -> None:
        """Start the process, and load the model's parsers. Raises MeshError."""
        await self.prepared(self.model(tokenizer), _PLAIN_CHAT)

    @property
    def is_installed(self) -> bool:
        return self._process.is_installed

    @property
    def pid(self) -> int | None:
        """The id of the parser process while it runs."""
        return self._process.pid

    async def prepared(
        self, model: ParsedModel, request: bytes, constrained_prompt: bytes = b""
    ) -> PreparedAnswer:
        """Raises UnusableParsers, InvalidRequest, ParserFailed, ParserUnavailable."""
        asked = PrepareAnswer(model.key, request, constrained_prompt)
        reply = await self._asked_again(model, asked)
        assert isinstance(reply, PreparedAnswer)
        return reply

    async def thinking_marks(self, model: ParsedModel) -> ThinkingMarks:
        """The marks around the model's reasoning. Raises the errors of `prepared`."""
        found = self._marks.get(model.tokenizer)
        if found is None:
            reply = await self._asked_again(model, AskMarks(model.key))
            assert isinstance(reply, MarksFound)
            found = ThinkingMarks(tuple(reply.begin), tuple(reply.end))
            self._marks[model.tokenizer] = found
        return found

    async def _asked_again(
        self, model: ParsedModel, request: PrepareAnswer | AskMarks
    ) -> ParserReply:
        """Ask the process. If the process dies, ask a new process once more."""
        for _ in range(_MAX_DEATHS):
            life = await self.life()
            try:
                return await self.ask(life, model, request)
            except ParserLost:
                continue
        raise ParserFailed("the parsers failed over this request")

    async def life(self) -> ParserLife:
        """Raises ParserUnavailable."""
        return await self._process.life()

    async def ask(
        self, life: ParserLife, model: ParsedModel, request: PrepareAnswer | AskMarks | OpenAnswer
    ) -> ParserReply:
        """Raises ParserLost, InvalidRequest, ParserFailed."""
        while not life.has(model.key):
            reply = await life.loaded(await asyncio.to_thread(model.load))
            if isinstance(reply, ParsingFailed):
                log.warning("parser.unusable", names=str(model.names), reason=reply.message)
                # From the next call on, the model is treated as a model without parsers.
                self._known[model.tokenizer] = model.key, ParserNames()
                raise UnusableParsers("the model's parsers cannot be used", field="tools")
        reply = await life.ask(request)
        _raise_if_failed(reply)
        return reply

    async def close(self) -> None:
        await self._process.close()


class CallParser:
    """The choices of one call. Each has its own state in the parser process."""

    def __init__(self, parsing: Parsing, opens: Sequence[OpenAnswer]) -> None:
        self._parsing = parsing
        self._choices = [_Choice(each) for each in opens]

    async def parsed(self, deltas: Sequence[TextDelta]) -> list[TextDelta]:
        """Raises InvalidRequest, ParserFailed, ParserUnavailable."""
        if len(deltas) == 1:
            return await self._parsed(deltas[0])
        parts = await asyncio.gather(*map(self._parsed, deltas))
        return [each for part in parts for each in part]

    def close(self) -> None:
        for choice in self._choices:
            if choice.life is not None:
                choice.life.close_choice(choice.open.choice)

    async def _parsed(self, delta: TextDelta) -> list[TextDelta]:
        choice = self._choices[delta.index]
        is_end = delta.is_last and delta.finish_reason is not None
        if not delta.token_ids and (not delta.is_last or not choice.token_ids):
            return [delta]  # no new tokens, or the scenario's default text, which has none
        while True:
            try:
                found = await self._fed(choice, delta.token_ids, is_end=is_end)
                break
            except ParserLost as exc:
                choice.life = None
                choice.num_deaths += exc.is_guilty
                if choice.num_deaths >= _MAX_DEATHS:
                    raise ParserFailed("the parsers failed over this answer") from None
        choice.token_ids.extend(delta.token_ids)
        return self._told(choice, delta, found)

    async def _fed(
        self, choice: _Choice, token_ids: Sequence[int], *, is_end: bool
    ) -> ParsedTokens:
        """The findings of the parsers in the new tokens.

        Raises ParserLost, and the errors of `parsed`.
        """
        parsers = self._parsing.parsers
        if choice.life is None:
            # `life` is set before the choice is opened. So `close` closes the choice even if the
            # client leaves while the choice is being opened.
            choice.life = await parsers.life()
            await parsers.ask(choice.life, self._parsing.model, choice.open)
            if choice.token_ids:
                await _feed(choice.life, choice, choice.token_ids, is_end=False)
        return await _feed(choice.life, choice, token_ids, is_end=is_end)

    def _told(self, choice: _Choice, delta: TextDelta, found: ParsedTokens) -> list[TextDelta]:
        pieces = found.pieces or [ParsedPiece()]
        choice.has_calls = choice.has_calls or any(piece.calls for piece in pieces)
        reason = delta.finish_reason
        if reason == "stop" and choice.has_calls and not self._parsing.is_named:
            reason = "tool_calls"
        bare = TextDelta(delta.index, "", (), ())
        told = []
        logprobs = delta.logprobs
        for piece in pieces[:-1]:
            own, logprobs = logprobs[: piece.num_tokens], logprobs[piece.num_tokens :]
            told.append(
                replace(
                    bare,
                    text=piece.content,
                    reasoning=piece.reasoning,
                    calls=_calls_of(piece),
                    logprobs=own,
                )
            )
        last = pieces[-1]
        told.append(
            replace(
                delta,
                text=last.content,
                logprobs=logprobs,
                reasoning=last.reasoning,
                calls=_calls_of(last),
                finish_reason=reason,
                num_reasoning_tokens=found.num_reasoning_tokens,
            )
        )
        return told


class _Choice:
    """`life` is the parser process in which the choice is open.

    `token_ids` has all tokens that were fed.
    """

    __slots__ = ("has_calls", "life", "num_deaths", "open", "token_ids")

    def __init__(self, frame: OpenAnswer) -> None:
        self.open = frame
        self.token_ids = array("I")
        self.life: ParserLife | None = None
        self.num_deaths = 0
        self.has_calls = False


async def _feed(
    life: ParserLife, choice: _Choice, token_ids: Sequence[int], *, is_end: bool
) -> ParsedTokens:
    """Raises ParserLost, InvalidRequest, ParserFailed."""
    found = ParsedTokens([])
    num_silent = 0  # tokens after the last piece
    for begin in range(0, max(1, len(token_ids)), _PIECE):
        is_last = is_end and begin + _PIECE >= len(token_ids)
        piece = list(token_ids[begin : begin + _PIECE])
        reply = await life.ask(FeedAnswer(choice.open.choice, piece, is_last))
        _raise_if_failed(reply)
        assert isinstance(reply, ParsedTokens)
        if reply.pieces:
            reply.pieces[0].num_tokens += num_silent
            num_silent = 0
        else:
            num_silent += len(piece)
        found.pieces += reply.pieces
        found.num_reasoning_tokens = reply.num_reasoning_tokens
    return found


def _calls_of(piece: ParsedPiece) -> tuple[ToolCallDelta, ...]:
    return tuple(ToolCallDelta(c.index, c.arguments, c.id, c.name) for c in piece.calls)


def _raise_if_failed(reply: ParserReply) -> None:
    if not isinstance(reply, ParsingFailed):
        return
    if reply.is_refusal:
        raise InvalidRequest(f"the model's parsers refuse: {reply.message}", field="tools")
    log.warning("parser.failed", reason=reply.message)
    raise ParserFailed("the parsers failed over this answer")
