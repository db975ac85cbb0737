"""Starts one mesh that has all of our variants.

The mesh has a prefill and a decode, which hand over KV whole or per layer, and one fusion instance
that keeps its KV. A request selects its variant by its gateway (whole or per layer) and by its
scenario (`local` for the fusion instance).
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from loadtests.handover.timing import Timing
from pdmesh.embedded.ports import PortReservation
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.v1.inference_service_pb2 import (
    GenerateRequest,
    GenerateStreamRequest,
    GenerationParams,
    TokenIds,
)
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub

_HOST: Final = "127.0.0.1"
_LOCAL: Final = "local"
_ASK_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Way:
    """One variant: the gateway's address and the scenario that select it."""

    address: str
    scenario: str = ""

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Timing:
        request = GenerateRequest(
            model="default",
            token_ids=TokenIds(ids=prompt),
            params=GenerationParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            scenario=self.scenario,
        )
        times: list[float] = []
        tokens: list[int] = []
        with grpc.insecure_channel(self.address) as channel:
            grpc.channel_ready_future(channel).result(_ASK_S)
            stub = InferenceServiceStub(channel)
            asked = time.monotonic()
            answers = stub.GenerateStream(GenerateStreamRequest(request=request), timeout=_ASK_S)
            for answer in answers:
                times += [time.monotonic()] * len(answer.token_ids)
                tokens += answer.token_ids
        return Timing.of(asked, times, tokens)


@contextlib.asynccontextmanager
async def running_ways(engine: str, model_dir: Path) -> AsyncIterator[dict[str, Way]]:
    """The variants of a running mesh by name: local, whole, per_layer."""
    with PortReservation(_HOST, 0) as whole, PortReservation(_HOST, 0) as layers:
        spec = MeshSpec(
            engine="sim" if engine == "sim" else "vllm",
            model_dir=model_dir,
            num_fusion=1,
            num_gateways=2,
            http_port=0,
            grpc_port=0,
            service_env={
                "gateway-0": {"PDMESH_GATEWAY_GRPC_PORT": str(whole.port)},
                "gateway-1": {
                    "PDMESH_GATEWAY_GRPC_PORT": str(layers.port),
                    "PDMESH_KV_TRANSFER": "per_layer",
                },
                "fusion-0": {"PDMESH_SCENARIO": _LOCAL, "PDMESH_GROUP_ID": _LOCAL},
            },
        )
        with tempfile.TemporaryDirectory(prefix="pdmesh-handover-") as directory:
            async with Mesh(spec, Path(directory)):
                yield {
                    "local": Way(whole.address, _LOCAL),
                    "whole": Way(whole.address),
                    "per_layer": Way(layers.address),
                }
