"""What the sim model answers, computed in one place without a mesh: tests compare the mesh with
this.

Written in plain integers, token by token, and shares only the weights and the draw with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.engine.base import FinishReason, Sampling
from pdmesh.engine.sim.model import MASK, SimModel, SimParams, draw_key, mix
from pdmesh.engine.sim.vocabulary import EOS_ID


def sim_reference(
    prompt: Sequence[int], sampling: Sampling, params: SimParams | None = None
) -> tuple[list[int], FinishReason]:
    """All tokens after `prompt` and why they end. A sampled request needs a seed."""
    model = SimModel(params or SimParams())
    weights, gain = model.state_weights.tolist(), model.token_gain.tolist()
    key = draw_key(sampling.temperature, sampling.seed, 0)
    state = digest = num_tokens = 0
    tokens: list[int] = []
    pending = list(prompt)
    while True:
        for token in pending:
            state = state + (token + 1) * weights[num_tokens] & MASK
            digest = digest + mix(state) * gain[num_tokens] & MASK
            num_tokens += 1
        drawn = model.draw_one(digest, key, pending[-1], not sampling.ignore_eos)
        tokens.append(drawn)
        if not sampling.ignore_eos and drawn in sampling.stop_token_ids | {EOS_ID}:
            return tokens, FinishReason.STOP
        if len(tokens) == sampling.max_tokens or num_tokens + 1 == model.params.max_model_len:
            return tokens, FinishReason.LENGTH
        pending = [drawn]
