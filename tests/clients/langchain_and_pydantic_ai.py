"""Sends the requests that applications send through langchain-openai and pydantic-ai."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


def answers(url: str) -> dict[str, Any]:
    given: dict[str, Any] = {"base_url": url, "api_key": "none", "model": "default"}
    chat = ChatOpenAI(**given, max_tokens=8)
    shaped = ChatOpenAI(
        **given,
        max_completion_tokens=8,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": 1.0},
        n=1,
        stop_sequences=["\n\n\n\n"],
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
    )
    completion = OpenAI(**given, max_tokens=8)
    model = OpenAIChatModel("default", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, instructions="Be brief.", model_settings={"max_tokens": 8})

    async def agent_stream() -> str:
        async with agent.run_stream("hello") as run:
            return "".join([text async for text in run.stream_text(delta=True)])

    return {
        "chat": chat.invoke([SystemMessage("Be brief."), HumanMessage("hello")]).content,
        "chat, streamed": "".join(str(chunk.content) for chunk in chat.stream("hello")),
        "usage": chat.invoke("hello").usage_metadata,
        "batch": [message.content for message in chat.batch(["a", "b"])],
        "shaped": shaped.invoke("hello").content,
        "no tool": chat.bind_tools([StructuredTool.from_function(add)], tool_choice="none")
        .invoke("1 + 1?")
        .content,
        "completion": completion.invoke("hello"),
        "completion, streamed": "".join(completion.stream("hello")),
        "agent": agent.run_sync("hello").output,
        "agent, streamed": asyncio.run(agent_stream()),
    }


if __name__ == "__main__":
    print(json.dumps(answers(sys.argv[1])))
