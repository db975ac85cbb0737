"""Makes answers that copy a part of a long prompt with edits, and draws them with each proposer.

The prompt is the source code of this repository, so its lines repeat as those of real code do. No
model draws the tokens: the answers are given. So proposers differ only by their own work.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

_FOLDERS: Final = ("libs/pdmesh/core", "libs/pdmesh/engine", "libs/pdmesh/kv", "services")
_WORD: Final = re.compile(r"\b[a-z_]{4,}\b")
# Bounds for a random number per line. Below the first, the line is deleted. Below the second,
# another line is inserted before it.
_DELETED, _INSERTED = 0.03, 0.06


class Proposer(Protocol):
    def begin(self, text: Sequence[int], num_drawn: int) -> None: ...
    def step(self, drawn: Sequence[int]) -> list[int]:
        """The proposal after these tokens were drawn."""
        ...


@dataclass(frozen=True, slots=True)
class Followed:
    num_drawn: int
    num_steps: int
    num_proposed: int
    num_accepted: int

    @property
    def accepted_per_step(self) -> float:
        return self.num_accepted / self.num_steps

    @property
    def accepted_share(self) -> float:
        return self.num_accepted / max(1, self.num_proposed)


def source_lines(root: Path) -> list[str]:
    files = sorted(path for folder in _FOLDERS for path in (root / folder).rglob("*.py"))
    return [line for file in files for line in file.read_text().splitlines(keepends=True)]


def edited(lines: Sequence[str], rng: random.Random) -> str:
    """The lines with one word renamed everywhere, some lines deleted, and some inserted."""
    words = sorted({word for line in lines for word in _WORD.findall(line)})
    renamed = rng.choice(words)
    result = []
    for line in lines:
        kind = rng.random()
        if kind < _DELETED:
            continue
        if kind < _INSERTED:
            result.append(rng.choice(lines).replace(rng.choice(words), "another_name"))
        result.append(re.sub(rf"\b{renamed}\b", f"new_{renamed}", line))
    return "".join(result)


@dataclass(frozen=True, slots=True)
class Task:
    prompt: list[int]
    answer: list[int]


def tasks(
    lines: Sequence[str],
    encode: Callable[[str], list[int]],
    num_tokens: int,
    num_tasks: int,
    num_edited: int = 60,
) -> list[Task]:
    """Prompts of `num_tokens`, and answers that repeat lines of the prompt with edits.

    An answer has `num_edited` lines, which begin in the first half of the prompt.
    """
    made = []
    for seed in range(num_tasks):
        rng = random.Random(seed)
        begin = rng.randrange(len(lines))
        turned = [*lines[begin:], *lines[:begin]]
        prompt = encode("".join(turned[: num_tokens // 4]))[:num_tokens]
        assert len(prompt) == num_tokens, "the source code is too short"
        # A line has about eleven tokens.
        middle = rng.randrange(max(1, num_tokens // 22))
        made.append(Task(prompt, encode(edited(turned[middle : middle + num_edited], rng))))
    return made


def follow(proposer: Proposer, task: Task, num_first: int = 1) -> Followed:
    """Draw the answer with the proposer's help. Prefill has drawn the first `num_first` tokens."""
    answer, position, num_steps, num_proposed = task.answer, num_first, 0, 0
    proposer.begin([*task.prompt, *answer[:num_first]], num_first)
    drawn: Sequence[int] = answer[:num_first]
    while position < len(answer):
        proposal = proposer.step(drawn)
        rest, num_accepted = answer[position:], 0
        for proposed, token in zip(proposal, rest, strict=False):
            if proposed != token:
                break
            num_accepted += 1
        drawn = rest[: num_accepted + 1]
        position += len(drawn)
        num_proposed += len(proposal)
        num_steps += 1
    num_drawn = len(answer) - num_first
    # A step draws one token of its own, and the accepted tokens.
    return Followed(num_drawn, num_steps, num_proposed, num_drawn - num_steps)
