"""Draws the answers of plain vLLM, which is vLLM without the mesh.

This program reads cases from a JSON file. It writes the drawn tokens and their margins to another
file. A margin is the difference between the log probabilities of the two likeliest tokens. The
program is a separate process with vLLM's engine, without connector and events. From the mesh it
uses only the cases, their structural tags, and the choice of the core for each rank.

Arguments: model directory, dtype, block size, file of cases, file of tokens, further engine
arguments as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdmesh.cores import usable_cores
from pdmesh.engine.grammars.asked_grammars import AskedGrammar, GrammarKind, grammar_of
from pdmesh.engine.vllm.config import thread_binding


def main() -> None:
    model, dtype, block_size, cases_file, tokens_file, further = sys.argv[1:]
    engine = {
        "kv_cache_memory_bytes": 512 << 20,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "skip_tokenizer_init": True,
        **json.loads(further),
    }
    num_ranks = engine.get("tensor_parallel_size", 1)
    if num_ranks > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = thread_binding(usable_cores(), num_ranks)
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
    from vllm import LLM
    from vllm.config import ReasoningConfig

    if "reasoning_config" in engine:
        engine["reasoning_config"] = ReasoningConfig(**engine["reasoning_config"])
    llm = LLM(
        model,
        dtype=dtype,
        enforce_eager=True,
        block_size=int(block_size),
        gpu_memory_utilization=0.3,
        **engine,
    )
    cases = json.loads(Path(cases_file).read_text())
    outputs = llm.generate(
        [prompt_of(case) for case in cases],
        [sampling_params(case) for case in cases],
        use_tqdm=False,
        lora_request=lora_requests([case["adapter"] for case in cases]),
    )
    drawn = [output.outputs[0] for output in outputs]
    answers = {
        "tokens": [list(answer.token_ids) for answer in drawn],
        "margins": [[margin(likely) for likely in answer.logprobs] for answer in drawn],
        "told": [told(answer) for answer in drawn] if has_told(cases) else [],
    }
    Path(tokens_file).write_text(json.dumps(answers))
    os._exit(0)  # vLLM does not always exit cleanly, and nothing is left to do


def prompt_of(case: Mapping[str, Any]) -> Any:
    """The prompt in vLLM's form. vLLM's own processor inserts the images."""
    prompt = {"prompt_token_ids": case["prompt"]}
    if not case["images"]:
        return prompt
    from vllm.multimodal.media.image import ImageMediaIO

    pictures = [ImageMediaIO().load_bytes(Path(path).read_bytes()) for path in case["images"]]
    return {**prompt, "multi_modal_data": {"image": [p.media for p in pictures]}}


def lora_requests(folders: list[str]) -> Any:
    """LoRA requests, as vLLM's server makes them from names. None if no case has an adapter."""
    if not any(folders):
        return None
    from vllm.lora.request import LoRARequest

    numbers = {folder: number for number, folder in enumerate(sorted(set(folders) - {""}), 1)}
    made = {
        folder: LoRARequest(Path(folder).name, number, folder) for folder, number in numbers.items()
    }
    return [made.get(folder) for folder in folders]


def sampling_params(case: Mapping[str, Any]) -> Any:
    """Sampling parameters, as vLLM's server makes them from a client's request."""
    from vllm import SamplingParams

    form = case["form"]
    shaping = dict(case["shaping"])
    words, budget = shaping.pop("bad_words"), shaping.pop("thinking_token_budget")
    params = SamplingParams(
        max_tokens=case["max_tokens"],
        temperature=case["temperature"],
        seed=case["seed"],
        detokenize=False,
        ignore_eos=True,
        stop_token_ids=case["stop_token_ids"],
        logprobs=None if case["logprob_token_ids"] else 2,
        logprob_token_ids=case["logprob_token_ids"] or None,
        logit_bias=dict(shaping.pop("logit_bias")) or None,
        allowed_token_ids=shaping.pop("allowed_token_ids") or None,
        structured_outputs=structured(*form) if form else None,
        thinking_token_budget=budget["num_tokens"] if budget else None,
        **shaping,
    )
    # vLLM would make these with its tokenizer, which is off
    params._bad_words_token_ids = words or None
    return params


def structured(kind: str, text: str) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    match kind:
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "choice":
            return StructuredOutputsParams(choice=json.loads(text))
        case "structural_tag":
            # vLLM 0.32 takes each JSON schema for a schema of schemas, under which any JSON is
            # valid.
            lark = grammar_of(AskedGrammar(GrammarKind(kind), text))
            return StructuredOutputsParams(grammar=lark)
        case "calls":
            lark = grammar_of(AskedGrammar(GrammarKind(kind), text))
            return StructuredOutputsParams(grammar=lark)
        case _:
            return StructuredOutputsParams(**{kind: text})


def has_told(cases: list[dict[str, Any]]) -> bool:
    return any(case["logprob_token_ids"] for case in cases)


def told(answer: Any) -> list[list[tuple[int, float]]]:
    """For each token of the answer, log probabilities by token id, in vLLM's order."""
    return [[(i, each.logprob) for i, each in step.items()] for step in answer.logprobs]


def margin(likely: Mapping[int, Any]) -> float:
    """The difference between the log probabilities of the two likeliest tokens."""
    first, second = sorted((token.logprob for token in likely.values()), reverse=True)[:2]
    return float(first - second)


if __name__ == "__main__":
    main()
