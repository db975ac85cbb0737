"""Checks with Transformers whether the tokens of an answer are the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def num_unlike_transformers(
    model_dir: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> int:
    """The number of answers with a token that is not the likeliest one in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    num_unlike = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
        likeliest: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
        num_unlike += likeliest != list(answer)
    return num_unlike
