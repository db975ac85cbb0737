"""What a client pays for the hand-over of KV on vLLM, by length of prompt.

    python -m loadtests.handover [--rounds 5] [--nixl FOLDER] [--out FILE]
    python -m loadtests.handover --again FILE.json    # write the page again from the numbers

Our hand-over is compared with one engine that keeps its KV, and with vLLM's NixlConnector. One
greedy request with a new prompt runs at a time. Each round uses each variant once at each length,
in random order, so that all variants see the same machine. A ratio compares two answers of the same
round. FOLDER holds nixl, made by `pip install --no-deps --target FOLDER nixl==1.5.1
nixl-cu13==1.5.1 nvidia-cuda-runtime`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Final

from loadtests.handover.mesh import running_ways
from loadtests.handover.nixl_pair import NixlPair
from loadtests.handover.report import Run, Sample, about, markdown
from loadtests.handover.timing import Timing
from loadtests.harness.progress import Progress

_LENGTHS: Final = (128, 512, 1024, 2000)
_NUM_TOKENS: Final = 8
_WORDS: Final = (1000, 40_000)  # the ids of the model's ordinary tokens
_MODEL_DIR: Final = Path(".cache/models/SmolLM2-135M-Instruct")

Ask = Callable[[Sequence[int], int], Timing]


def measure(ways: dict[str, Ask], lengths: Sequence[int], rounds: int) -> list[Sample]:
    rng = random.Random(11)
    progress = Progress((rounds + 1) * len(lengths))
    samples = []
    for number in range(rounds + 1):
        for length in lengths:
            progress.step(f"round {number}, {length} tokens")
            for name in rng.sample(sorted(ways), len(ways)):
                # Each variant gets a prompt of its own, since an engine would not compute a prompt
                # that it holds. All prompts have the same length.
                prompt = [rng.randrange(*_WORDS) for _ in range(length)]
                timing = ways[name](prompt, _NUM_TOKENS)
                if number:  # the first round opens connections and warms up memory
                    samples.append(Sample(number, length, name, timing))
    progress.close()
    return samples


def check_equal(ways: dict[str, Ask], lengths: Sequence[int]) -> dict[int, bool]:
    """Whether all variants draw the same tokens for the same prompt, for each length."""
    rng = random.Random(5)
    prompts = {length: [rng.randrange(*_WORDS) for _ in range(length)] for length in lengths}
    return {
        length: len({ask(prompt, _NUM_TOKENS).tokens for ask in ways.values()}) == 1
        for length, prompt in prompts.items()
    }


async def run(options: argparse.Namespace) -> int:
    nixl = NixlPair(options.model_dir, options.nixl) if options.nixl else None
    with closing(nixl) if nixl else nullcontext():
        async with running_ways(options.engine, options.model_dir) as found:
            ways: dict[str, Ask] = {name: way.ask for name, way in found.items()}
            if nixl:
                ways["nixl"] = nixl.ask
            # In a thread, so that the launcher's event loop can go on supervising its processes.
            samples = await asyncio.to_thread(measure, ways, options.lengths, options.rounds)
            equal = await asyncio.to_thread(check_equal, ways, options.lengths)
    command = shlex.join(["python", "-m", "loadtests.handover", *sys.argv[1:]])
    measured = Run(about(command, options.rounds), equal, samples)
    text = markdown(measured)
    print(text)
    if options.out:
        options.out.with_suffix(".md").write_text(text)
        options.out.with_suffix(".json").write_text(json.dumps(measured.to_json(), indent=1) + "\n")
    return 0


def write_again(found: Path) -> int:
    text = markdown(Run.from_json(json.loads(found.read_text())))
    found.with_suffix(".md").write_text(text)
    print(text)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtests.handover", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of all ways and lengths (5)")
    parser.add_argument("--engine", choices=("vllm", "sim"), default="vllm")
    parser.add_argument("--model-dir", type=Path, default=_MODEL_DIR)
    parser.add_argument("--nixl", type=Path, help="a folder with nixl: vLLM's own connector too")
    parser.add_argument("--lengths", type=int, nargs="+", default=_LENGTHS, help="prompt tokens")
    parser.add_argument("--out", type=Path, help="write this .md and .json")
    parser.add_argument("--again", type=Path, help="measure nothing: write the page of this .json")
    options = parser.parse_args(arguments)
    return write_again(options.again) if options.again else asyncio.run(run(options))


if __name__ == "__main__":
    raise SystemExit(main())
