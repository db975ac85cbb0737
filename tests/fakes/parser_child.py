"""A process that parses answers without vLLM. Each token is one character.

Some tokens make the process slow, hang or fail. Run it with `python -m tests.fakes.parser_child`.
With `--unfit`, it has no parsers for any model.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Final

from pdmesh.services.gateway.parsing.child import received, send
from pdmesh.services.gateway.parsing.frames import (
    CloseAnswer,
    FeedAnswer,
    LoadParsers,
    OpenAnswer,
    ParsedPiece,
    ParsedTokens,
    ParserDone,
    ParserReply,
    ParserRequest,
    ParsingFailed,
    PrepareAnswer,
    PreparedAnswer,
)

DEADLY: Final = 0x2620
HANGING: Final = 0x231B
FAULTY: Final = 0x21AF
SLOW: Final = 0x231A  # this token takes SLOW_S of CPU time
SLOW_S: Final = 0.002


def main() -> None:
    open_choices: set[int] = set()
    send(sys.stdout.buffer, ParserDone())
    while (request := received(sys.stdin.buffer)) is not None:
        if (reply := _reply(request, open_choices)) is not None:
            send(sys.stdout.buffer, reply)


def _reply(request: ParserRequest, open_choices: set[int]) -> ParserReply | None:
    match request:
        case LoadParsers() if "--unfit" in sys.argv:
            return ParsingFailed("no such token", is_refusal=True)
        case PrepareAnswer():
            return PreparedAnswer(False)
        case OpenAnswer():
            open_choices.add(request.choice)
        case CloseAnswer():
            open_choices.discard(request.choice)
            return None
        case FeedAnswer():
            assert request.choice in open_choices
            if DEADLY in request.token_ids:
                os._exit(1)
            if HANGING in request.token_ids:
                signal.pause()
            until = time.process_time() + SLOW_S * request.token_ids.count(SLOW)
            while time.process_time() < until:
                pass
            if FAULTY in request.token_ids:
                return ParsingFailed("ValueError: a fault")
            return ParsedTokens([ParsedPiece(content="".join(map(chr, request.token_ids)))])
    return ParserDone()


if __name__ == "__main__":
    main()
