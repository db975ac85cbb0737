"""Time per proposal and tokens accepted, by proposer and length of the prompt (S116, S117).

    python -m loadtests.speculation.proposals --out loadtests/results/speculation-DATE

Each proposer is called as vLLM's model runner calls it, with one request in the batch. The answer
is given, so no model computes. The proposers take turns with the same answers, so that the
machine's other work affects all alike. Times are CPU times of the process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from loadtests.harness.generator import ROOT
from loadtests.harness.results import Spread, write
from loadtests.speculation.edits import Followed, Proposer, Task, follow, source_lines, tasks
from pdmesh.engine.vllm.speculation.prompt_lookup import PromptLookup
from pdmesh.models import smollm2

MAX_LEN: Final = 131_072
OURS: Final = "ours, with a cursor"
# the limit for our time divided by that of vLLM's n-gram proposer, for prompts of _BAR_TOKENS or
# more
_BAR: Final = 1.0
_BAR_TOKENS: Final = 10_000


class _Batch:
    """One request in vLLM's arrays. `calls` has the CPU seconds of each call."""

    def __init__(self) -> None:
        self.texts = np.zeros((1, MAX_LEN), dtype=np.int32)
        self.lengths = np.zeros(1, dtype=np.int32)
        self.num_requests = 0
        self.calls: list[float] = []

    @property
    def request_id(self) -> str:
        return f"r{self.num_requests}"

    def begin(self, text: Sequence[int], num_drawn: int) -> None:
        self.num_requests += 1
        self.num_drawn = self.num_fresh = num_drawn
        self.texts[0, : len(text)] = text
        self.lengths[0] = len(text)
        self.calls = []

    def put(self, drawn: Sequence[int]) -> None:
        """Append the drawn tokens. The first tokens of a request are in the text already."""
        if self.num_fresh:
            self.num_fresh = 0
            return
        end = int(self.lengths[0])
        self.texts[0, end : end + len(drawn)] = drawn
        self.lengths[0] = end + len(drawn)
        self.num_drawn += len(drawn)

    def timed(self, propose: Callable[[], list[list[int]]]) -> list[int]:
        began = time.process_time()
        proposal = propose()[0]
        self.calls.append(time.process_time() - began)
        return proposal


class _Ours(_Batch):
    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=MAX_LEN))
        self._proposer, self._num_tokens = PromptLookup(config), num_tokens

    def step(self, drawn: Sequence[int]) -> list[int]:
        self.put(drawn)
        known = {self.request_id: SimpleNamespace(output_token_ids=range(self.num_drawn))}

        def propose() -> list[list[int]]:
            self._proposer.begin_step([self.request_id], known, self._num_tokens)
            return self._proposer.propose([drawn], self.lengths, self.texts)

        return self.timed(propose)


class _Ngram(_Batch):
    def __init__(self, num_tokens: int, least: int, most: int) -> None:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        super().__init__()
        settings: Any = SimpleNamespace(
            speculative_config=SimpleNamespace(
                prompt_lookup_min=least, prompt_lookup_max=most, num_speculative_tokens=num_tokens
            ),
            model_config=SimpleNamespace(max_model_len=MAX_LEN),
            scheduler_config=SimpleNamespace(max_num_seqs=1024),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        self._proposer, self._num_tokens = NgramProposer(settings), num_tokens

    def step(self, drawn: Sequence[int]) -> list[int]:
        self.put(drawn)
        return self.timed(
            lambda: self._proposer.propose(
                self._num_tokens, [list(drawn)], self.lengths, self.texts
            )
        )


class _Suffix(_Batch):
    def __init__(self, num_tokens: int) -> None:
        from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

        super().__init__()
        settings: Any = SimpleNamespace(
            speculative_config=SimpleNamespace(
                num_speculative_tokens=num_tokens,
                suffix_decoding_max_tree_depth=24,  # vLLM's defaults
                suffix_decoding_max_spec_factor=1.0,
                suffix_decoding_min_token_prob=0.1,
                suffix_decoding_max_cached_requests=10_000,
            ),
            model_config=SimpleNamespace(max_model_len=MAX_LEN),
        )
        self._proposer, self._num_tokens = SuffixDecodingProposer(settings), num_tokens

    def step(self, drawn: Sequence[int]) -> list[int]:
        self.put(drawn)
        batch: Any = SimpleNamespace(
            req_ids=[self.request_id],
            req_id_to_index={self.request_id: 0},
            num_tokens_no_spec=self.lengths,
            num_prompt_tokens=[int(self.lengths[0]) - self.num_drawn],
            token_ids_cpu=self.texts,
        )
        return self.timed(lambda: self._proposer.propose(self._num_tokens, batch, [list(drawn)]))


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one round.

    `first_ms` is the median time of a request's first proposal. `later_us` is the mean time of the
    other proposals.
    """

    proposer: str
    num_prompt: int
    followed: Followed
    first_ms: float
    later_us: float


def proposers(num_tokens: int) -> dict[str, Callable[[], Proposer]]:
    found: dict[str, Callable[[], Proposer]] = {
        OURS: lambda: _Ours(num_tokens),
        "vLLM's ngram, 2 to 4 tokens": lambda: _Ngram(num_tokens, 2, 4),
        "vLLM's ngram, 5 tokens (its default)": lambda: _Ngram(num_tokens, 5, 5),
    }
    if find_spec("arctic_inference"):
        found["vLLM's suffix decoding"] = lambda: _Suffix(num_tokens)
    return found


def measured(name: str, proposer: Proposer, todo: Sequence[Task]) -> Measured:
    first, later, all_of_them = [], list[float](), list[Followed]()
    for task in todo:
        all_of_them.append(follow(proposer, task))
        assert isinstance(proposer, _Batch)
        first.append(proposer.calls[0])
        later += proposer.calls[1:]
    total = Followed(
        *(
            sum(getattr(each, part) for each in all_of_them)
            for part in ("num_drawn", "num_steps", "num_proposed", "num_accepted")
        )
    )
    # `later_us` is a mean, not a median, because rare slow steps must count.
    return Measured(
        name,
        len(todo[0].prompt),
        total,
        statistics.median(first) * 1e3,
        statistics.mean(later) * 1e6,
    )


def table(rounds: Sequence[Measured]) -> str:
    """A table of the times over the rounds. The numbers of accepted tokens are the same in each
    round.
    """
    lines = [
        (
            "| prompt tokens | proposer | later proposals, us | times ours | first proposal, ms "
            "| steps | accepted per step | accepted share |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for (length, name), found in _grouped(rounds).items():
        one = found[0].followed
        ours = [each.later_us for each in _grouped(rounds)[length, OURS]]
        ratios = [each.later_us / base for each, base in zip(found, ours, strict=True)]
        lines.append(
            f"| {length:,} | {name} | {Spread.of([f.later_us for f in found]).text('.0f')} "
            f"| {Spread.of(ratios).text('.1f')} "
            f"| {Spread.of([f.first_ms for f in found]).text('.1f')} | {one.num_steps:,} "
            f"| {one.accepted_per_step:.2f} | {one.accepted_share:.0%} |"
        )
    return "\n".join(lines)


def verdict(rounds: Sequence[Measured]) -> str:
    groups = _grouped(rounds)
    worst = min(
        statistics.median(
            other.later_us / ours.later_us
            for other, ours in zip(found, groups[length, OURS], strict=True)
        )
        for (length, name), found in groups.items()
        if name.startswith("vLLM's ngram") and length >= _BAR_TOKENS
    )
    accepted = {key: found[0].followed.accepted_per_step for key, found in groups.items()}
    more = all(
        accepted[key] < accepted[key[0], OURS]
        for key in accepted
        if key[1].startswith("vLLM's ngram")
    )
    bars = {
        f"from {_BAR_TOKENS:,} tokens on, no proposal of ours takes longer than vLLM's ngram "
        f"(it takes {worst:.1f} times as long as ours, at least)": worst >= _BAR,
        "with the cursor, more tokens are accepted per step than with vLLM's ngram": more,
    }
    return "\n".join(f"- {bar}: {'met' if ok else '**not met**'}" for bar, ok in bars.items())


def _grouped(rounds: Sequence[Measured]) -> Mapping[tuple[int, str], list[Measured]]:
    groups: dict[tuple[int, str], list[Measured]] = {}
    for each in rounds:
        groups.setdefault((each.num_prompt, each.proposer), []).append(each)
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", default="1000,10000,30000,100000", help="of the prompts")
    parser.add_argument("--proposed", type=int, default=4, help="most tokens per proposal (4)")
    parser.add_argument("--tasks", type=int, default=8, help="answers per length (8)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    options = parser.parse_args()
    model_dir = smollm2.ensure(smollm2.DEFAULT_DIR, print)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    lines, compared = source_lines(ROOT), proposers(options.proposed)
    rounds: list[Measured] = []
    for length in map(int, options.tokens.split(",")):
        todo = tasks(lines, lambda text: list(tokenizer.encode(text).ids), length, options.tasks)
        for make in compared.values():
            measured("", make(), todo[:1])  # the first call compiles and imports
        for _ in range(options.rounds):
            # New proposers in each round, since suffix decoding remembers the answers of other
            # requests.
            rounds += [measured(name, make(), todo) for name, make in compared.items()]
        print(f"{length:,} tokens: done", flush=True)
    text = f"{table(rounds)}\n\n{verdict(rounds)}"
    print(text)
    if options.out:
        write(
            options.out,
            "loadtests.speculation.proposals",
            "What a proposal costs and yields",
            f"{options.tasks} answers per length, each with 60 lines of the prompt's code: a word "
            "is renamed, a few lines are deleted or inserted. A proposal has at most "
            f"{options.proposed} tokens. Median (lowest..highest) of {options.rounds} rounds, in "
            "which the proposers took turns; CPU time per call, one request in the batch.",
            text,
            rounds=[asdict(each) for each in rounds],
        )


if __name__ == "__main__":
    main()
