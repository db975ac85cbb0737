"""The sim model's tokens: bytes, words and halves of characters.

The output consists of words and is valid UTF-8. Some characters are split over two tokens. So a
client that decodes a stream token by token must hold back the first half. The second half always
follows the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2  # <|im_end|>
IMAGE_ID = 0  # <|endoftext|>, which the sim model never draws, also stands for an image

_WORD_LIST = (
    "the of and to in is that for it was on are with as his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find "
    "use may water long little very after words called just where most know get through back much "
    "before go good new write our used me man too any day same right look think also around "
    "another came come work three word must because does part even place well such here take why "
    "things help put years different away again off went old number great tell men say small "
    "every found still between mesh block token prefill decode ticket lease café naïve über größe "
    "señor été"
)
_SPLIT_CHARACTERS = ("é", "ж", "€", "日", "語", "✓", "🙂", "🚀", "🌍")


def byte_alphabet() -> list[str]:
    """The printable character by which GPT-2's tokenizer writes each byte, by byte value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_in = {b: chr(b) for b in printable}
    others = (b for b in range(256) if b not in stand_in)
    stand_in.update({b: chr(0x100 + i) for i, b in enumerate(others)})
    return [stand_in[b] for b in range(256)]


@dataclass(slots=True)
class Vocabulary:
    """The vocabulary without the `SPECIALS`.

    `tokens[i]` is the bytes of the token with the id `len(SPECIALS) + i`. Each of the `merges`
    joins a token and one byte to a longer token.
    """

    tokens: list[bytes] = field(default_factory=list)
    merges: list[tuple[bytes, bytes]] = field(default_factory=list)
    drawable: list[int] = field(default_factory=list)  # the ids that the sim model may draw
    follow: dict[int, int] = field(default_factory=dict)  # first half -> second half
    _ids: dict[bytes, int] = field(default_factory=dict)

    def add(self, token: bytes) -> int:
        """Return the id of `token`. A new token is added together with all its prefixes."""
        if token not in self._ids:
            if len(token) > 1:
                self.add(token[:-1])
                self.merges.append((token[:-1], token[-1:]))
            self._ids[token] = len(SPECIALS) + len(self.tokens)
            self.tokens.append(token)
        return self._ids[token]

    def add_split(self, character: str) -> None:
        """Add a space and `character` as two tokens.

        The first is drawn, and the second must follow it.
        """
        data = character.encode()
        cut = len(data) - 1
        lead, tail = self.add(b" " + data[:cut]), self.add(data[cut:])
        assert self.follow.setdefault(lead, tail) == tail, f"{character!r} shares its first half"
        self.drawable.append(lead)

    @property
    def size(self) -> int:
        return len(SPECIALS) + len(self.tokens)


def build_vocabulary() -> Vocabulary:
    vocabulary = Vocabulary()
    for value in range(256):
        vocabulary.add(bytes([value]))
    vocabulary.drawable = [vocabulary.add(f" {word}".encode()) for word in _WORD_LIST.split()]
    for character in _SPLIT_CHARACTERS:
        vocabulary.add_split(character)
    return vocabulary
