"""Runs vLLM's own parsers on the tokens of a choice, which is one answer of a call.

Only the parser process imports vLLM. The parsers of a stream are fed token by token, as in vLLM. So
their findings do not depend on how many tokens arrive together. The findings stay the same if the
request moves to another instance, or if this process starts again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer as HfTokenizer
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tokenizers.hf import get_cached_tokenizer

from pdmesh.services.gateway.parsing.frames import (
    LoadParsers,
    MarksFound,
    OpenAnswer,
    ParsedCall,
    ParsedPiece,
    ParsedTokens,
    PrepareAnswer,
    PreparedAnswer,
)
from pdmesh.services.gateway.text.text_stream import Detokenizer, TextRules, TextStream

# Where vLLM's reasoning parsers keep the token that ends the reasoning.
_END_TOKENS: Final = ("end_token_id", "_reasoning_end_token_id", "_end_token_id")
# An attribute of some parsers, true if they have counted the streamed tokens.
_STREAMED: Final = "_streaming_count_valid"
_MARKS: Final = ("start_token_id", "end_token_id")
_MAX_REQUESTS: Final = 8  # requests to keep, each of a few kilobytes, or more with long tools
_BEYOND: Final = (KeyError, TypeError, ValueError, RuntimeError)


class BadParser(Exception):
    """The parser's name is unknown, or it cannot use the tokenizer, or knows no reasoning marks."""


# Many types in this module are Any, because vLLM has no types that a type checker could see.
class ModelParsers:
    """The parsers of one model. Raises BadParser."""

    def __init__(self, load: LoadParsers) -> None:
        inner = HfTokenizer.from_str(load.tokenizer)
        inner.no_truncation()
        inner.no_padding()
        self._decoders = {
            shown: Detokenizer(inner, are_special_shown=shown) for shown in (False, True)
        }
        fast = PreTrainedTokenizerFast(tokenizer_object=inner, **load.special_tokens)
        self._tokenizer = get_cached_tokenizer(fast)
        self._config: Any = SimpleNamespace(
            hf_config=SimpleNamespace(model_type=load.model_type),
            hf_text_config=None,
            hf_overrides=None,
            architecture=None,
        )
        self._reasoning_parser = load.reasoning_parser
        self._requests: OrderedDict[bytes, tuple[Any, dict[str, Any]]] = OrderedDict()
        try:
            self._kind: Any = ParserManager.get_parser(
                tool_parser_name=load.tool_parser or None,
                reasoning_parser_name=load.reasoning_parser or None,
                enable_auto_tools=bool(load.tool_parser),
                model_name=load.model,
                tokenizer=self._tokenizer,
            )
        except _BEYOND as exc:
            raise BadParser(str(exc)[:500]) from exc

    def prepared(self, frame: PrepareAnswer) -> PreparedAnswer:
        request, variables = self._request(frame.request)
        structured: Any = request.structured_outputs
        constraint = b""
        if structured is not None:
            asked = {
                name: value
                for name in ("json", "structural_tag")
                if (value := getattr(structured, name)) is not None
            }
            constraint = msgspec.json.encode(asked)
        prepared = PreparedAnswer(not request.skip_special_tokens, constraint.decode())
        if frame.constrained_prompt:
            prompt = array("I", frame.constrained_prompt).tolist()
            end = self._reasoning_end(request, variables, prompt)
            prepared.begins_after, prepared.lacks_end = end or [], end is None
        return prepared

    def _reasoning_end(
        self, request: Any, variables: dict[str, Any], prompt: list[int]
    ) -> list[int] | None:
        """The token that ends the reasoning, or None if no single token ends it.

        The list is empty if the answer has no reasoning, because the prompt already ends the
        reasoning or because the model has no reasoning parser.
        """
        parser = self._kind(
            self._tokenizer,
            request.tools,
            chat_template_kwargs=variables,
            model_config=self._config,
        )
        reasoner = parser.reasoning_parser
        if reasoner is None or reasoner.is_reasoning_end(prompt):
            return []
        for holder in (reasoner, getattr(reasoner, "_parser_engine", None)):
            for name in _END_TOKENS:
                if isinstance(found := getattr(holder, name, None), int):
                    return [found]
        found = self._tokenizer.get_added_vocab().get(reasoner.reasoning_end_str)
        return None if found is None else [found]

    def marks(self) -> MarksFound:
        """The tokens that begin and end the reasoning, as vLLM finds them for this parser.

        Raises BadParser.
        """
        kind: Any = ReasoningParserManager.get_reasoning_parser(self._reasoning_parser)
        reasoner = kind(self._tokenizer)
        found = [
            self._tokenizer.encode(mark, add_special_tokens=False) if mark else []
            for mark in (reasoner.reasoning_start_str, reasoner.reasoning_end_str)
        ]
        if not all(found):
            raise BadParser("this model's reasoning has no marks around it")
        return MarksFound(*found)

    def opened(self, frame: OpenAnswer) -> ChoiceParser:
        request, variables = self._request(frame.request)
        parser = self._kind(
            self._tokenizer,
            request.tools,
            chat_template_kwargs=variables,
            model_config=self._config,
        )
        rules = TextRules(
            frame.stops,
            frame.min_tokens,
            frame.is_stop_shown,
            frame.are_special_shown,
            frozenset(frame.end_ids),
        )
        prompt = array("I", frame.prompt).tolist()
        text = TextStream(self._decoders[frame.are_special_shown], prompt, rules)
        return ChoiceParser(parser, request, text, prompt, rules.end_ids, is_whole=frame.is_whole)

    def _request(self, body: bytes) -> tuple[Any, dict[str, Any]]:
        """The request as vLLM's serving layer passes it to a parser. A call's choices share it."""
        if (known := self._requests.get(body)) is not None:
            self._requests.move_to_end(body)
            return known
        request = ChatCompletionRequest.model_validate_json(body)
        variables = request.build_chat_params(None, "auto").chat_template_kwargs
        parser = self._kind(
            self._tokenizer,
            request.tools,
            chat_template_kwargs=variables,
            model_config=self._config,
        )
        known = self._requests[body] = parser.adjust_request(request), variables
        if len(self._requests) > _MAX_REQUESTS:
            self._requests.popitem(last=False)
        return known


class ChoiceParser:
    """Parses one choice. With `is_whole`, it reports nothing before the last token."""

    def __init__(
        self,
        parser: Any,
        request: Any,
        text: TextStream,
        prompt: list[int],
        end_ids: frozenset[int],
        *,
        is_whole: bool,
    ) -> None:
        self._parser = parser
        self._end_ids = end_ids
        self._request = request
        self._text = text
        self._prompt = prompt
        self._is_whole = is_whole
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        if is_whole:
            parser.set_prompt_token_ids(prompt)

    def feed(self, token_ids: list[int], *, is_last: bool) -> ParsedTokens:
        self._token_ids += token_ids
        if self._is_whole:
            return self._whole(token_ids, is_last=is_last)
        pieces: list[ParsedPiece] = []
        for at, token_id in enumerate(token_ids):
            is_end = is_last and at == len(token_ids) - 1
            text = self._text.feed([token_id]) + (self._rest() if is_end else "")
            self._add(pieces, text, [token_id], is_end=is_end)
            if pieces:
                pieces[-1].num_tokens = at + 1 - sum(p.num_tokens for p in pieces[:-1])
        if is_last and not token_ids:
            self._add(pieces, self._rest(), [], is_end=True)
        return ParsedTokens(pieces, self._num_reasoning_tokens() if is_last else 0)

    def _rest(self) -> str:
        return "" if self._text.is_stopped else self._text.finish()

    def _num_reasoning_tokens(self) -> int:
        """The number of tokens between the marks of the reasoning.

        This is the number that vLLM reports for a whole answer. For a stream, vLLM leaves out
        tokens that add no text by themselves, such as a part of a character. If the prompt begins
        the reasoning, vLLM's older parsers count no tokens. For these parsers, the begin mark is
        added.
        """
        reasoner = self._parser.reasoning_parser
        if reasoner is None or reasoner.is_reasoning_end(self._prompt):
            return 0
        counted = self._token_ids
        while counted and counted[-1] in self._end_ids:
            counted = counted[:-1]
        if hasattr(reasoner, _STREAMED):
            setattr(reasoner, _STREAMED, False)
        else:
            marked = getattr(reasoner, "_parser", reasoner)
            start, end = (getattr(marked, name, None) for name in _MARKS)
            if start is not None and end is not None:
                first = next((i for i in counted if i in (start, end)), None)
                counted = counted if first == start else [start, *counted]
        return int(reasoner.count_reasoning_tokens(counted))

    def _add(self, pieces: list[ParsedPiece], text: str, ids: list[int], *, is_end: bool) -> None:
        found = self._parser.parse_delta(
            delta_text=text,
            delta_token_ids=ids,
            request=self._request,
            prompt_token_ids=self._prompt,
            finished=is_end,
        )
        if found is None:
            return
        calls = [
            ParsedCall(
                call.index,
                (call.function.arguments if call.function else None) or "",
                call.id or "",
                (call.function.name if call.function else None) or "",
            )
            for call in found.tool_calls
            if self._may_call(call.index)
        ]
        _append(pieces, ParsedPiece(found.reasoning or "", found.content or "", calls))

    def _may_call(self, index: int) -> bool:
        return index == 0 or self._request.parallel_tool_calls is not False

    def _whole(self, token_ids: list[int], *, is_last: bool) -> ParsedTokens:
        self._texts.append(self._text.feed(token_ids))
        if not is_last:
            return ParsedTokens([])
        reasoning, content, calls = self._parser.parse(
            "".join(self._texts) + self._rest(),
            self._request,
            enable_auto_tools=True,
            model_output_token_ids=self._token_ids,
        )
        found = [
            ParsedCall(index, call.arguments, call.id or make_tool_call_id(), call.name)
            for index, call in enumerate(calls or ())
            if self._may_call(index)
        ]
        if not self._request.include_reasoning:
            reasoning = None
        piece = ParsedPiece(reasoning or "", content or "", found, len(token_ids))
        return ParsedTokens([piece], self._num_reasoning_tokens())


def _append(pieces: list[ParsedPiece], new: ParsedPiece) -> None:
    """Add `new` to the last piece if this keeps the order of contents, else as another piece."""
    last = pieces[-1] if pieces else None
    if (
        last is None
        or (new.reasoning and (last.content or last.calls))
        or (new.content and last.calls)
    ):
        if new.reasoning or new.content or new.calls:
            pieces.append(new)
        return
    last.reasoning += new.reasoning
    last.content += new.content
    for call in new.calls:
        before = last.calls[-1] if last.calls else None
        if before is not None and before.index == call.index and not (call.id or call.name):
            before.arguments += call.arguments
        else:
            last.calls.append(call)
