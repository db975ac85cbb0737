"""Translates the mesh's sampling parameters into vLLM's, and vLLM's outputs into drawn tokens.

A constraint is a grammar that the answer must follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pdmesh.core.sampling.thinking_budget import ThinkingBudget, ThinkingMarks
from pdmesh.engine.base import FinishReason, PromptLogprobs, Sampling, TokenLogprob
from pdmesh.engine.vllm.host.job_facts import Drawn
from pdmesh.engine.vllm.sampling_extras import NUM_DRAWN

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs, Logprob

# A key in `extra_args`: the token ids after which the constraint begins.
BEGINS_AFTER: Final = "pdmesh_begins_after"
# A key in `extra_args`: how many tokens may be reasoning, and the ids of its begin and end marks.
THINKING: Final = "pdmesh_thinking"
# A key in the `kv_transfer_params` of a request's last output, if the constraint made the request
# fail.
CONSTRAINT_FAILED: Final = "pdmesh_constraint_failed"
ALL_TOLD: Final = -1  # for `num_top`: all tokens for which vLLM gives log probabilities
_LARGEST_SEED: Final = (1 << 63) - 1
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def sampling_params(
    sampling: Sampling, max_tokens: int, kv_transfer_params: Mapping[str, Any] | None = None
) -> SamplingParams:
    """vLLM's parameters for a request.

    vLLM gets no tokenizer, so only token ids end a request, and no id is turned into text.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    extra: dict[str, Any] = (
        {"kv_transfer_params": dict(kv_transfer_params)} if kv_transfer_params else {}
    )
    if sampling.num_drawn:
        extra[NUM_DRAWN] = sampling.num_drawn
    shaping, constraint = sampling.shaping, sampling.constraint
    if constraint is not None and constraint.begins_after:
        extra[BEGINS_AFTER] = list(constraint.begins_after)
    if (budget := shaping.thinking_token_budget) is not None:
        marks = budget.marks
        extra[THINKING] = [budget.num_tokens, list(marks.begin), list(marks.end)]
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p if sampling.temperature > 0 else 1.0,
        seed=honoured(sampling.seed),
        stop_token_ids=sorted(sampling.stop_token_ids),
        ignore_eos=True,  # the job's stop tokens include the EOS tokens
        presence_penalty=shaping.presence_penalty,
        frequency_penalty=shaping.frequency_penalty,
        repetition_penalty=shaping.repetition_penalty,
        top_k=shaping.top_k,
        min_p=shaping.min_p,
        min_tokens=max(0, min(shaping.min_tokens - sampling.num_drawn, max_tokens)),
        logit_bias=dict(shaping.logit_bias) or None,
        allowed_token_ids=list(shaping.allowed_token_ids) or None,
        logprobs=None if sampling.logprob_token_ids else sampling.num_logprobs,
        logprob_token_ids=list(sampling.logprob_token_ids) or None,
        prompt_logprobs=sampling.num_prompt_logprobs,
        flat_logprobs=sampling.num_prompt_logprobs is not None,  # an object per token would be slow
        structured_outputs=StructuredOutputsParams(grammar=constraint.grammar)
        if constraint is not None
        else None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra or None,
    )
    if shaping.bad_words:  # vLLM would make token ids from words with a tokenizer, which it lacks
        params._bad_words_token_ids = [list(word) for word in shaping.bad_words]
    return params


def thinking_budget_of(params: Any) -> ThinkingBudget | None:
    """The thinking budget that `sampling_params` wrote, if there is one.

    `params` is vLLM's SamplingParams, or None for a request that draws nothing.
    """
    extra = params.extra_args if params is not None else None
    if not extra or THINKING not in extra:
        return None
    num_tokens, begin, end = extra[THINKING]
    return ThinkingBudget(num_tokens, ThinkingMarks(tuple(begin), tuple(end)))


def honoured(seed: int | None) -> int | None:
    """The seed for vLLM, which reads -1 as no seed.

    The largest seed replaces -1, because no answer of a call has the largest seed
    (`check_choices`).
    """
    return _LARGEST_SEED if seed == -1 else seed


def num_told(sampling: Sampling) -> int | None:
    """How many likely tokens are reported with each drawn token, with their log probabilities.

    None means that not even the drawn token's log probability is reported.
    """
    return ALL_TOLD if sampling.logprob_token_ids else sampling.num_logprobs


def drawn(leg: int, output: RequestOutput, num_top: int | None) -> Drawn:
    """Translates one streamed output of vLLM.

    A finish reason that the mesh does not know means that vLLM failed the request.
    """
    completion = output.outputs[0]
    reason = completion.finish_reason
    is_error = reason is not None and reason not in _FINISH
    tokens = list(completion.token_ids)
    logprobs: Sequence[TokenLogprob] = ()
    if num_top is not None and completion.logprobs:
        logprobs = token_logprobs(tokens, completion.logprobs, num_top)
    return Drawn(
        leg,
        tokens,
        logprobs,
        _FINISH.get(reason) if reason else None,
        output.num_cached_tokens or 0,
        is_error=is_error,
        is_constraint_error=is_error and CONSTRAINT_FAILED in (output.kv_transfer_params or ()),
        prompt_logprobs=prompt_logprobs(output.prompt_logprobs) if output.prompt_logprobs else None,
    )


def prompt_logprobs(found: FlatLogprobs) -> PromptLogprobs:
    """The log probabilities of the prompt's tokens. The first token has none."""
    size = found.end_indices[-1] - found.start_indices[-1]  # the token and the likeliest ones
    ranks = [found.ranks[start] or 0 for start in found.start_indices[1:]]
    return PromptLogprobs(max(0, size - 1), found.token_ids, found.logprobs, ranks)


def token_logprobs(
    tokens: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]], num_top: int
) -> tuple[TokenLogprob, ...]:
    """For each token its log probability and the `num_top` likeliest tokens.

    vLLM adds the drawn token if it is not among the likeliest. With `ALL_TOLD`, all tokens that
    vLLM gives are taken in vLLM's order: first the drawn token, then the tokens that the request
    asked for.
    """
    result = []
    for token, choices in zip(tokens, logprobs, strict=True):
        told = list(choices.items())
        if num_top != ALL_TOLD:
            told = sorted(told, key=lambda item: -item[1].logprob)[:num_top]
        top = tuple((token_id, choice.logprob) for token_id, choice in told)
        result.append(TokenLogprob(token, choices[token].logprob, top))
    return tuple(result)
