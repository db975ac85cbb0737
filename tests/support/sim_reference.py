"""Computes the answers of the simulated model without a mesh, as a reference for tests.

The computation uses plain integers, token by token. It shares with the engine only the weights, the
draw of a token and the code for grammars.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdmesh.engine.base import FinishReason, Sampling
from pdmesh.engine.grammars.compiler import GrammarCompiler
from pdmesh.engine.grammars.guide import Guide
from pdmesh.engine.sim.constraints.draws import LimitedGuide, guided_vocabulary
from pdmesh.engine.sim.constraints.tokenizer import sim_vocabulary
from pdmesh.engine.sim.model import MASK, SimModel, SimParams, draw_key, mix
from pdmesh.engine.sim.vocabulary import EOS_ID

_compiler = GrammarCompiler(sim_vocabulary)


def sim_reference(
    prompt: Sequence[int],
    sampling: Sampling,
    params: SimParams | None = None,
    adapter: str = "",
) -> tuple[list[int], FinishReason]:
    """All tokens of the answer, and why the answer ends. A sampled request needs a seed.

    `adapter` is the digest of a LoRA adapter, or empty.
    """
    model = SimModel(params or SimParams())
    weights, gain = model.state_weights.tolist(), model.token_gain.tolist()
    key = draw_key(sampling, 0)
    state = int(adapter[:16], 16) | 1 if adapter else 0
    digest = num_tokens = 0
    tokens: list[int] = []
    constraint = sampling.constraint
    guide = None
    if constraint is not None:
        allowed = sampling.shaping.allowed_token_ids
        guide = LimitedGuide(Guide.after(constraint, _compiler, ()), allowed)
    pending = list(prompt)
    while True:
        for token in pending:
            state = state + (token + 1) * weights[num_tokens] & MASK
            digest = digest + mix(state) * gain[num_tokens] & MASK
            num_tokens += 1
        is_long_enough = len(tokens) >= sampling.shaping.min_tokens
        may_end = is_long_enough and not sampling.ignore_eos
        drawn = model.draw_one(digest, key, pending[-1], may_end)
        if guide is not None:
            drawn = guided_vocabulary().draw_next(guide, drawn, digest + key, may_end)
        tokens.append(drawn)
        ends = sampling.stop_token_ids | (set() if sampling.ignore_eos else {EOS_ID})
        if drawn in ends and (is_long_enough or drawn == EOS_ID):
            return tokens, FinishReason.STOP
        if len(tokens) == sampling.max_tokens or num_tokens + 1 == model.params.max_model_len:
            return tokens, FinishReason.LENGTH
        pending = [drawn]
