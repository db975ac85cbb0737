"""The scenarios of overhead.py: their kind of request, their concurrency, and their prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from typing import Final

from loadtests.harness.client import LoadSpec, chat_body

CHAT_PATH: Final = "/v1/chat/completions"
CONCURRENCIES: Final = (1, 8, 64, 256)
STREAM_TOKENS: Final = 128
HANDOVER_TOKENS: Final = 8
_WORDS: Final = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number "
    "night point home water room mother area money story fact month lot right study book eye job "
    "word"
)


class Kind(Enum):
    """The kind of request. The prefill answers `ONE_TOKEN` alone. The others move KV to a decode,
    except on a fusion instance.
    """

    ONE_TOKEN = "1 token, plain"
    HANDOVER = f"{HANDOVER_TOKENS} tokens, plain"
    STREAM = f"{STREAM_TOKENS} tokens, streamed"
    SHORT_STREAM = f"{HANDOVER_TOKENS} tokens, streamed"

    @property
    def num_tokens(self) -> int:
        return int(self.value.split()[0])

    @property
    def is_stream(self) -> bool:
        return self.value.endswith("streamed")


@dataclass(frozen=True, slots=True)
class Scenario:
    kind: Kind
    concurrency: int
    think_s: float = 0.0  # mean pause of each connection before its next request

    @property
    def pauses(self) -> str:
        return f"{self.think_s * 500:.0f} to {self.think_s * 1500:.0f} ms"

    @property
    def name(self) -> str:
        pause = f", pauses of {self.pauses}" if self.think_s else ""
        return f"{self.kind.value} x {self.concurrency}{pause}"

    def spec(
        self,
        host: str,
        port: int,
        prompts: tuple[str, ...],
        *,
        warmup_s: float,
        duration_s: float,
        max_requests: int | None = None,
    ) -> LoadSpec:
        kind = self.kind
        bodies = tuple(chat_body(p, kind.num_tokens, is_stream=kind.is_stream) for p in prompts)
        return LoadSpec(
            host=host,
            port=port,
            path=CHAT_PATH,
            bodies=bodies,
            concurrency=self.concurrency,
            warmup_s=warmup_s,
            duration_s=duration_s,
            max_requests=max_requests,
            think_s=self.think_s,
        )


# Low load. The mesh finishes its work after an answer (events, logs, freed KV) before the next
# request comes.
LOW_LOAD: Final = Scenario(Kind.STREAM, 1, think_s=0.01)
# A real model on a laptop takes seconds for 128 tokens. Answers are short, since a run must have
# many first tokens.
LOW_LOAD_REAL: Final = Scenario(Kind.SHORT_STREAM, 1, think_s=0.01)
# For comparisons with other servers. Each request follows at once, so the processor's caches are
# still warm from the one before.
ONE_STREAM: Final = Scenario(Kind.STREAM, 1)
SCENARIOS_REAL: Final = (
    LOW_LOAD_REAL,
    Scenario(Kind.ONE_TOKEN, 1),
    Scenario(Kind.SHORT_STREAM, 8),
)
SCENARIOS: Final = (
    LOW_LOAD,
    *(
        Scenario(kind, concurrency)
        for kind in (Kind.ONE_TOKEN, Kind.HANDOVER, Kind.STREAM)
        for concurrency in CONCURRENCIES
    ),
)


def make_prompts(num_prompts: int, num_words: int, seed: int = 1) -> tuple[str, ...]:
    """Prompts with about one token per word. They differ from the first word on."""
    rng, words = random.Random(seed), _WORDS.split()
    return tuple(
        f"{number} {' '.join(rng.choices(words, k=num_words))}" for number in range(num_prompts)
    )
