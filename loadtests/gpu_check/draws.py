"""Checks that a seeded draw on a GPU depends on the seed and the position, not on earlier draws
(S37).
"""

from __future__ import annotations

import torch

from loadtests.gpu_check.finding import Finding
from pdmesh.engine.vllm.connector.worker.draws.seeded_draws import SeededDraws

VOCABULARIES = (997, 49_152, 151_936)
NUM_TOKENS = 48


def check() -> Finding:
    wrong, total = list[str](), 0
    for size in VOCABULARIES:
        for dtype in (torch.float32, torch.float64):
            row = torch.empty(size, dtype=dtype, device="cuda")
            expected = _uninterrupted(row, seed=size)
            for position in range(NUM_TOKENS):
                total += 1
                if not _goes_on_as(expected, position, row, seed=size):
                    wrong.append(f"{size} {dtype} from token {position}")
    claim = (
        f"{total} answers that go on in a new generator at any of {NUM_TOKENS} tokens, against one "
        f"generator that is never moved: {len(wrong)} drew other noise {wrong[:3] or ''}".rstrip()
    )
    return Finding("Seeded draws", claim + ".", not wrong)


def _uninterrupted(row: torch.Tensor, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda")
    generator.manual_seed(seed)
    return [torch.empty_like(row).exponential_(generator=generator) for _ in range(NUM_TOKENS)]


def _goes_on_as(expected: list[torch.Tensor], position: int, row: torch.Tensor, seed: int) -> bool:
    draws = SeededDraws(device="cuda")
    draws.begin(seed)
    for at in range(position, min(position + 3, NUM_TOKENS)):
        draws.move_to(at, row, is_word=False)
        if not torch.equal(torch.empty_like(row).exponential_(generator=draws), expected[at]):
            return False
    return True
