"""The messages between a gateway and its parser process: a length, then MessagePack.

Each request except `CloseAnswer` has one reply, and replies come in the order of the requests.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

LENGTH: Final = struct.Struct("!I")


class LoadParsers(msgspec.Struct, tag=True):
    """A model's tokenizer.json, and the names of its parsers. An empty name means no parser."""

    model: str
    tokenizer: str
    special_tokens: dict[str, str]
    model_type: str
    tool_parser: str
    reasoning_parser: str


class PrepareAnswer(msgspec.Struct, tag=True):
    """Asks what the parsers of an answer to `request` need.

    They may need a constraint in the engine, or special tokens in the text. `constrained_prompt` is
    the prompt if the answer may have a constraint, else empty. The prompt decides whether the
    constraint begins after the reasoning.
    """

    model: str
    request: bytes
    constrained_prompt: bytes = b""


class AskMarks(msgspec.Struct, tag=True):
    """Asks for the marks around a model's reasoning."""

    model: str


class OpenAnswer(msgspec.Struct, tag=True):
    """Opens a choice, which is one answer of a call. Its tokens will be fed.

    `request` is the part of the request that the parsers read, as JSON. The fields from `stops` on
    say how tokens become text.
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
    """`constraint` is vLLM's structured outputs as JSON, if the answer must have a form.

    `begins_after` has the tokens after which a constraint begins. If it is empty, the constraint
    begins at once. `lacks_end` means that no single token ends the reasoning, so that no constraint
    can follow it.
    """

    are_special_shown: bool
    constraint: str = ""
    begins_after: list[int] = []
    lacks_end: bool = False


class MarksFound(msgspec.Struct, tag=True):
    """The token ids that begin the reasoning, and the token ids that end it."""

    begin: list[int]
    end: list[int]


class ParsedCall(msgspec.Struct, array_like=True):
    """A piece of a tool call. The first piece has the id and the name of the call."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class ParsedPiece(msgspec.Struct, array_like=True):
    """Reasoning, text and tool calls that came together, in the order in which clients read them.

    `num_tokens` is the number of new tokens that were read for this piece. Tokens that gave nothing
    count for the piece before them, or for the first piece if none is before them.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[ParsedCall] = []
    num_tokens: int = 0


class ParsedTokens(msgspec.Struct, tag=True):
    pieces: list[ParsedPiece]
    num_reasoning_tokens: int = 0


class ParsingFailed(msgspec.Struct, tag=True):
    """`is_refusal` means that the request itself cannot be served."""

    message: str
    is_refusal: bool = False


ParserRequest = LoadParsers | PrepareAnswer | AskMarks | OpenAnswer | FeedAnswer | CloseAnswer
ParserReply = ParserDone | PreparedAnswer | MarksFound | ParsedTokens | ParsingFailed
_encoder: Final = msgspec.msgpack.Encoder()
requests: Final = msgspec.msgpack.Decoder(ParserRequest)
replies: Final = msgspec.msgpack.Decoder(ParserReply)


def framed(message: ParserRequest | ParserReply) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
