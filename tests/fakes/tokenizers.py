"""Small tokenizers, one for each way in which decoders turn tokens into text."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models

from pdmesh.engine.sim.constraints.tokenizer import build_tokenizer
from pdmesh.services.gateway.text.tokenizer import ModelFacts
from pdmesh.services.gateway.text.tokenizer import Tokenizer as ModelTokenizer

BYTE_LEVEL = build_tokenizer()
SIM_TOKENIZER = ModelTokenizer(
    BYTE_LEVEL, None, ModelFacts(frozenset(), BYTE_LEVEL.get_vocab_size())
)
PIECES = ("▁", "▁a", "▁the", "b", "ing", "▁▁", ",", "é", "▁日本")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    """A tokenizer with pieces, bytes and special tokens, in the order of a SentencePiece
    vocabulary.
    """
    vocab = {piece: i for i, piece in enumerate((*PIECES, *BYTES))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PIECES[0]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return tokenizer


TOKENIZERS: dict[str, Tokenizer] = {
    "llama": sentencepiece(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(content=" ", left=1),
            ]
        )
    ),
    "metaspace": sentencepiece(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    ),
    "wordpiece": sentencepiece(decoders.WordPiece(prefix="##")),
    "byte level": BYTE_LEVEL,
}

# the token "</s>" of all tokenizers that are like SentencePiece's
END = TOKENIZERS["llama"].get_vocab_size() - 1
