"""What a gateway and its parser process say to each other: MessagePack behind a length.

Each request but `CloseAnswer` has one reply, in the order of the requests.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

LENGTH: Final = struct.Struct("!I")


class LoadParsers(msgspec.Struct, tag=True):
    """A model's tokenizer, as its tokenizer.json, and its parsers; an empty name is none."""

    model: str
    tokenizer: str
    special_tokens: dict[str, str]
    model_type: str
    tool_parser: str
    reasoning_parser: str


class PrepareAnswer(msgspec.Struct, tag=True):
    """Asks what parsing an answer to `request` needs of the engine and of the text.

    `constrained_prompt`: of an answer with a constraint, which may begin after the reasoning.
    """

    model: str
    request: bytes
    constrained_prompt: bytes = b""


class OpenAnswer(msgspec.Struct, tag=True):
    """A choice whose answer will be fed. `request`: the part of it that parsers read, as JSON.

    The rest is how its tokens become text.
    """

    choice: int
    model: str
    request: bytes
    prompt: bytes
    is_whole: bool
    stops: tuple[str, ...]
    min_tokens: int
    is_stop_shown: bool
    are_special_shown: bool
    end_ids: list[int]


class FeedAnswer(msgspec.Struct, tag=True):
    choice: int
    token_ids: list[int]
    is_last: bool = False


class CloseAnswer(msgspec.Struct, tag=True):
    choice: int


class ParserDone(msgspec.Struct, tag=True):
    pass


class PreparedAnswer(msgspec.Struct, tag=True):
    """`constraint`: vLLM's structured outputs as JSON, if the answer has to have a form.

    `begins_after`: the tokens after which a constraint begins; none: with the answer.
    """

    are_special_shown: bool
    constraint: str = ""
    begins_after: list[int] = []


class ParsedCall(msgspec.Struct, array_like=True):
    """Of a tool call; the first piece of it has its id and its name."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class ParsedPiece(msgspec.Struct, array_like=True):
    """What came together, in the order in which clients read it."""

    reasoning: str = ""
    content: str = ""
    calls: list[ParsedCall] = []


class ParsedTokens(msgspec.Struct, tag=True):
    pieces: list[ParsedPiece]
    num_reasoning_tokens: int = 0


class ParsingFailed(msgspec.Struct, tag=True):
    """`is_refusal`: the request itself cannot be served."""

    message: str
    is_refusal: bool = False


ParserRequest = LoadParsers | PrepareAnswer | OpenAnswer | FeedAnswer | CloseAnswer
ParserReply = ParserDone | PreparedAnswer | ParsedTokens | ParsingFailed
_encoder: Final = msgspec.msgpack.Encoder()
requests: Final = msgspec.msgpack.Decoder(ParserRequest)
replies: Final = msgspec.msgpack.Decoder(ParserReply)


def framed(message: ParserRequest | ParserReply) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
