"""Makes the noise of a seeded draw a function of the seed and the token's position in the answer.

vLLM's older model runner makes a generator when an engine request begins, and advances it once per
step. In the mesh, an answer continues in another engine request at decode, and again after a
migration to another instance. So before each draw, this module moves the generator to the token's
position in the answer. vLLM's newer model runner needs no patch, because its noise is already such
a function.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

_WORD = 1 << 31  # vLLM's sampler for CPUs draws one number below this per token


class SeededDraws(torch.Generator):
    """The noise of one engine request.

    `position` is the number of draws since `begin` seeded the generator. A step that checks
    proposed tokens does not consume exactly one draw's noise per token. So after the first step of
    this kind (`has_checked`), the generator is not moved any more. It continues from its current
    state, and no noise is used twice.
    """

    def begin(self, seed: int) -> None:
        self.seed_asked, self.position, self.has_checked = seed, 0, False
        self.manual_seed(seed)

    def move_to(self, position: int, row: torch.Tensor, *, is_word: bool) -> None:
        """Move the generator to the state in which it draws token `position` of the answer.

        Each draw takes one word if `is_word`, and otherwise as many numbers as `row` has.
        """
        if position != self.position:
            self.manual_seed(self.seed_asked)
            self._skip(position, row, is_word=is_word)
        self.position = position + 1  # after the draw

    def _skip(self, num_draws: int, row: torch.Tensor, *, is_word: bool) -> None:
        if is_word:
            torch.randint(0, _WORD, (num_draws,), generator=self, dtype=torch.long)
        elif self.device.type == "cpu":
            for _ in range(num_draws):
                torch.empty_like(row).exponential_(generator=self)
        elif num_draws:
            torch.empty_like(row).exponential_(generator=self)
            self.set_offset(self.get_offset() * num_draws)

    def get_offset(self) -> int:
        return 0 if self.device.type == "cpu" else int(super().get_offset())

    def set_offset(self, offset: int) -> None:
        """vLLM calls this to rewind the generator after a draw that is discarded.

        A prompt that is computed in chunks draws at each step, and only the last draw is kept. On a
        CPU, a generator has no offset, and the engine would crash. `move_to` does the rewinding
        there.
        """
        if self.device.type != "cpu":
            super().set_offset(offset)


def draw_by_position() -> None:
    """Patch the model runner of this process. Idempotent."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample = GPUModelRunner._sample
    if getattr(sample, "is_by_position", False):
        return

    @functools.wraps(sample)
    def by_position(runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if runner.input_batch.generators and logits is not None:
            checked = spec_decode_metadata
            put_generators(runner, logits, checked.num_draft_tokens if checked is not None else ())
        return sample(runner, logits, spec_decode_metadata)

    by_position.is_by_position = True  # type: ignore[attr-defined]
    GPUModelRunner._sample = by_position


def put_generators(runner: Any, logits: torch.Tensor, num_proposed: Sequence[int] = ()) -> None:
    """Move each seeded request's generator to the position of the request's next token.

    The position is the request's number of output tokens. `drawn_before` makes this number include
    tokens that another engine drew. `runner` is vLLM's model runner, which has no stable type.
    `num_proposed` has, by row, the number of proposed tokens that this step checks. It is empty if
    the step checks none.
    """
    batch, sampler = runner.input_batch, runner.sampler.topk_topp_sampler
    is_fp64 = sampler.use_fp64_gumbel
    is_word = sampler.forward.__name__ == "forward_cpu" and not is_fp64
    row = torch.empty_like(logits[0], dtype=torch.float64 if is_fp64 else torch.float32)
    for index, generator in list(batch.generators.items()):
        state = runner.requests[batch.req_ids[index]]
        params = state.sampling_params
        if not isinstance(generator, SeededDraws):
            generator = SeededDraws(device=generator.device)
            generator.begin(params.seed)
            batch.generators[index] = state.generator = generator
        if not generator.has_checked:
            generator.move_to(len(state.output_token_ids), row, is_word=is_word)
            generator.has_checked = bool(num_proposed) and num_proposed[index] > 0
