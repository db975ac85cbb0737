"""Clients of a cluster's gateway: OpenAI's client for HTTP, and a gRPC client."""

from __future__ import annotations

import threading
from typing import Final, Self

import grpc
from openai import OpenAI

from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.compose.cluster import Cluster

QUESTION: Final = "What is the capital of France?"
_TIMEOUT_S: Final = 120


def ask(cluster: Cluster, max_tokens: int = 24) -> str:
    """Send a question with OpenAI's client, streamed and without retries. The call must succeed."""
    with _client(cluster) as client:
        chunks = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
        )
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def ask_grpc(cluster: Cluster) -> str:
    request = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content=QUESTION)],
        params=pb.GenerationParams(max_tokens=24, temperature=0),
    )
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        reply = InferenceServiceStub(channel).Chat(request, timeout=_TIMEOUT_S)
        return reply.message.content


class LongStream(threading.Thread):
    """A stream of exactly `max_tokens` tokens, which a thread reads.

    The end of the block waits for the end of the stream, and raises the client's error.
    """

    def __init__(self, cluster: Cluster, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._cluster, self._max_tokens = cluster, max_tokens
        self._error: BaseException | None = None
        self.text, self.num_tokens, self.num_chunks = "", 0, 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        try:
            self._read()
        except BaseException as exc:
            self._error = exc

    def _read(self) -> None:
        with _client(self._cluster) as client:
            for chunk in client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=self._max_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            ):
                self.num_chunks += 1
                if chunk.choices:
                    self.text += chunk.choices[0].delta.content or ""
                elif chunk.usage is not None:
                    self.num_tokens = chunk.usage.completion_tokens


def _client(cluster: Cluster) -> OpenAI:
    return OpenAI(
        base_url=f"http://127.0.0.1:{cluster.http_port}/v1",
        api_key="unused",
        max_retries=0,
        timeout=_TIMEOUT_S,
    )
