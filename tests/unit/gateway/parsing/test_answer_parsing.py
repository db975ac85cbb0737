"""Each piece of a parsed answer has the log probabilities of its own tokens."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from pdmesh.core.kv.prefix.block_hash import tokens_to_bytes
from pdmesh.services.gateway.parsing.answer_parsing import CallParser, Parsing
from pdmesh.services.gateway.parsing.frames import (
    FeedAnswer,
    OpenAnswer,
    ParsedCall,
    ParsedPiece,
    ParsedTokens,
)
from pdmesh.services.gateway.text.choice_text import TextDelta
from pdmesh.v1.common_pb2 import TokenLogprob

TEXT, CALL, SILENT = range(3)  # the tokens in this test: of text, of a call, and without output


class Life:
    """Stands in for the parser process. It makes a piece of each run of equal tokens."""

    async def ask(self, request: FeedAnswer) -> ParsedTokens:
        pieces: list[ParsedPiece] = []
        for at, token_id in enumerate(request.token_ids):
            if token_id == TEXT:
                if not pieces or pieces[-1].calls:
                    pieces.append(ParsedPiece())
                pieces[-1].content += "a"
            elif token_id == CALL:
                if not pieces or pieces[-1].content:
                    pieces.append(ParsedPiece(calls=[ParsedCall(0)]))
                pieces[-1].calls[-1].arguments += "1"
            if pieces:
                pieces[-1].num_tokens = at + 1 - sum(p.num_tokens for p in pieces[:-1])
        return ParsedTokens(pieces)


class Parsers:
    async def life(self) -> Any:
        return Life()

    async def ask(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("num_silent", [0, 3, 63, 64, 200])
async def test_log_probabilities_are_divided_among_the_pieces(num_silent: int) -> None:
    token_ids = [*[SILENT] * num_silent, *[TEXT] * 3, SILENT, *[CALL] * 2, *[TEXT] * 70, SILENT]
    parsers: Any = Parsers()
    model: Any = None
    opened = OpenAnswer(1, "", b"", tokens_to_bytes(array("I")), False, (), 0, False, False, [])
    parser = CallParser(Parsing(parsers, model, b""), [opened])
    logprobs = [TokenLogprob(token_id=token_id, logprob=-i) for i, token_id in enumerate(token_ids)]
    told = await parser.parsed([TextDelta(0, "", token_ids, logprobs)])
    assert [each for piece in told for each in piece.logprobs] == logprobs
    for piece in told:
        assert {each.token_id for each in piece.logprobs} - {SILENT} == (
            {CALL} if piece.calls else {TEXT}
        )
    assert sum(len(piece.text) for piece in told) == 73
