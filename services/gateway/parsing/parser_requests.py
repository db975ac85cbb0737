"""Handles each request to the parser process, and keeps models' parsers and open choices.

A choice is one answer of a call. It is open while its tokens arrive.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import vllm.parser.abstract_parser  # noqa: F401 - it takes seconds: at the start, not in a call
from pydantic import ValidationError
from vllm.exceptions import VLLMValidationError

from pdmesh.services.gateway.parsing.frames import (
    AskMarks,
    CloseAnswer,
    FeedAnswer,
    LoadParsers,
    OpenAnswer,
    ParserDone,
    ParserReply,
    ParserRequest,
    ParsingFailed,
    PrepareAnswer,
)
from pdmesh.services.gateway.parsing.vllm_parsers import BadParser, ChoiceParser, ModelParsers

_MAX_MESSAGE: Final = 500


class ParserRequests:
    """Keeps at most `max_models` models.

    The least recently used model is dropped, but its open choices continue.
    """

    def __init__(self, max_models: int) -> None:
        self._max_models = max_models
        self._models: OrderedDict[str, ModelParsers] = OrderedDict()
        self._choices: dict[int, ChoiceParser] = {}

    def handle(self, request: ParserRequest) -> ParserReply | None:
        try:
            return self._handled(request)
        except (VLLMValidationError, ValidationError, BadParser) as exc:
            return ParsingFailed(str(exc)[:_MAX_MESSAGE], is_refusal=True)
        except Exception as exc:  # noqa: BLE001 - a parser's fault ends one choice, not all
            return ParsingFailed(f"{type(exc).__name__}: {exc}"[:_MAX_MESSAGE])

    def _handled(self, request: ParserRequest) -> ParserReply | None:
        match request:
            case LoadParsers():
                self._models[request.model] = ModelParsers(request)
                while len(self._models) > self._max_models:
                    self._models.popitem(last=False)
                return ParserDone()
            case PrepareAnswer():
                return self._model(request.model).prepared(request)
            case AskMarks():
                return self._model(request.model).marks()
            case OpenAnswer():
                self._choices[request.choice] = self._model(request.model).opened(request)
                return ParserDone()
            case FeedAnswer():
                choice = self._choices[request.choice]
                return choice.feed(request.token_ids, is_last=request.is_last)
            case CloseAnswer():
                self._choices.pop(request.choice, None)
                return None

    def _model(self, name: str) -> ModelParsers:
        self._models.move_to_end(name)
        return self._models[name]
