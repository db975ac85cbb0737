"""Sends requests through litellm as applications do.

They go through litellm's provider for OpenAI, and again through its provider for vLLM.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise, litellm would fetch prices

import litellm

HELLO = [{"role": "user", "content": "hello"}]


def answers(url: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for provider in ("openai", "hosted_vllm"):
        given: dict[str, Any] = {
            "model": f"{provider}/default",
            "api_base": url,
            "api_key": "none",
            "messages": HELLO,
            "max_tokens": 8,
        }
        chat = litellm.completion(**given)
        chunks = litellm.completion(**given, stream=True, stream_options={"include_usage": True})
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        shaped = litellm.completion(
            **given,
            temperature=0.5,
            top_p=0.9,
            seed=1,
            stop=["\n\n\n\n"],
            presence_penalty=0.1,
            frequency_penalty=0.1,
            user="somebody",
            metadata={"a": "b"},
            extra_body={"top_k": 5, "repetition_penalty": 1.1},
        )
        found[provider] = chat.choices[0].message.content
        found[f"{provider}, usage"] = chat.usage.completion_tokens
        found[f"{provider}, streamed"] = "".join(pieces)
        found[f"{provider}, shaped"] = shaped.choices[0].message.content
    text = litellm.text_completion(
        model="text-completion-openai/default",
        prompt="hello",
        api_base=url,
        api_key="none",
        max_tokens=8,
    )
    return found | {"completion": text.choices[0].text}


if __name__ == "__main__":
    print(json.dumps(answers(sys.argv[1])))
