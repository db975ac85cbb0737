"""The parser process: `python -m pdmesh.services.gateway.parsing.child`.

Requests are frames on stdin, and replies are frames on stdout. The process ends when its gateway
ends, because that closes stdin. The output of libraries goes to stderr.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import BinaryIO, Final

from pdmesh.services.gateway.parsing.frames import (
    LENGTH,
    ParserDone,
    ParserReply,
    ParserRequest,
    ParsingFailed,
    framed,
    requests,
)

# The number of models to keep. When the least recently used one is dropped, its answers under way
# keep their parsers.
MAX_MODELS: Final = 4


def main() -> None:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_NO_USAGE_STATS": "1",
    }
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        from pdmesh.services.gateway.parsing.parser_requests import ParserRequests
    except ImportError as exc:
        send(answers, ParsingFailed(str(exc)))
        return
    # vLLM's parsers log a traceback for each tool call that a model leaves unfinished. Output that
    # they cannot parse becomes text of the answer, and the gateway logs their exceptions.
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    requests = ParserRequests(MAX_MODELS)
    send(answers, ParserDone())
    while (request := received(sys.stdin.buffer)) is not None:
        reply = requests.handle(request)
        if reply is not None:
            send(answers, reply)


def received(source: BinaryIO) -> ParserRequest | None:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = source.read(size)
    return requests.decode(body) if len(body) == size else None


def send(answers: BinaryIO, reply: ParserReply) -> None:
    answers.write(framed(reply))
    answers.flush()


if __name__ == "__main__":
    main()
