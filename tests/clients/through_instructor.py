"""Sends the requests that applications send through instructor.

Instructor sends a pydantic model as a tool, as a schema, or as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    town: str
    degrees: int


def answers(url: str, mode: str) -> dict[str, Any]:
    inner = OpenAI(base_url=url, api_key="none", max_retries=0)
    client = instructor.from_openai(inner, mode=instructor.Mode[mode])
    given: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "Weather?"}],
        "response_model": Weather,
        "max_tokens": 200,
    }
    found, completion = client.chat.completions.create_with_completion(**given, max_retries=9)
    parts = [part.model_dump() for part in client.chat.completions.create_partial(**given)]
    return {
        "whole": found.model_dump(),
        "streamed": parts[-1],
        "num_tokens": completion.usage.completion_tokens,
    }


if __name__ == "__main__":
    print(json.dumps(answers(sys.argv[1], sys.argv[2])))
