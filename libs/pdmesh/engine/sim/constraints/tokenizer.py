"""The sim model's tokenizer, for Hugging Face's library and for llguidance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdmesh.engine.sim.vocabulary import EOS_ID, SPECIALS, build_vocabulary, byte_alphabet

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer


def build_tokenizer() -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary, alphabet = build_vocabulary(), byte_alphabet()

    def spelled(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    ids = {name: number for number, name in enumerate(SPECIALS)}
    ids |= {spelled(t): len(SPECIALS) + n for n, t in enumerate(vocabulary.tokens)}
    merges = [(spelled(left), spelled(right)) for left, right in vocabulary.merges]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    return tokenizer


def sim_vocabulary() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(build_tokenizer().to_str(), eos_token=EOS_ID)
