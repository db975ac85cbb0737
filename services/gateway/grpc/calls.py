"""Turns requests of the gRPC API into OpenAI requests, and these into call specs or results."""

from __future__ import annotations

import dataclasses
from array import array

from msgspec.structs import replace

from pdmesh.core.tenancy.limits import Tenant
from pdmesh.services.gateway.access.access_control import Permit
from pdmesh.services.gateway.grpc.translation import (
    NAMES_OF_DETOKENIZE,
    chat_of,
    completion_of,
    tokenize_of,
)
from pdmesh.services.gateway.openai import calls
from pdmesh.services.gateway.openai.schema import (
    DetokenizeRequest,
    check_chat,
    check_completion,
    check_tokenize,
)
from pdmesh.services.gateway.openai.translated import FieldNames, name_of, naming
from pdmesh.services.gateway.request.bounds import check_names
from pdmesh.services.gateway.request.frontend import Frontend
from pdmesh.services.gateway.request.spec import CallSpec, ServedModel
from pdmesh.v1 import inference_service_pb2 as pb


async def generate_spec(
    request: pb.GenerateRequest, frontend: Frontend, tenant: Tenant
) -> CallSpec:
    """Raises MeshError."""
    completion, names = completion_of(request)
    with naming(names):
        check_completion(completion)
        spec = await calls.completion_spec(completion, frontend, tenant, default_max_tokens=None)
    return _named(spec, names)


async def chat_spec(request: pb.ChatRequest, frontend: Frontend, permit: Permit) -> CallSpec:
    """Raises MeshError."""
    translated = chat_of(request)
    with translated.naming():
        check_chat(translated.chat)
        spec = await calls.chat_spec(translated.chat, frontend, permit)
    return _named(spec, translated.names)


def _named(spec: CallSpec, names: FieldNames) -> CallSpec:
    """The spec with the gRPC name of the field that asks for the constraint, if any.

    Later errors contain this name.
    """
    sampling = spec.sampling
    if sampling.constraint is None:
        return spec
    asked_by = name_of(sampling.constraint.asked_by, names)
    constraint = dataclasses.replace(sampling.constraint, asked_by=asked_by)
    return replace(spec, sampling=replace(sampling, constraint=constraint))


async def tokenized(
    request: pb.TokenizeRequest, frontend: Frontend, permit: Permit
) -> tuple[array[int], ServedModel]:
    """See `openai.calls`. Raises MeshError."""
    asked, names = tokenize_of(request)
    with naming(names):
        check_tokenize(asked)
        return await calls.tokenized(asked, frontend, permit)


async def detokenized(request: pb.DetokenizeRequest, frontend: Frontend, permit: Permit) -> str:
    """See `openai.calls`. Raises MeshError."""
    check_names(model=request.model)
    asked = DetokenizeRequest(request.model, list(request.token_ids))
    with naming(NAMES_OF_DETOKENIZE):
        return await calls.detokenized(asked, frontend, permit)
