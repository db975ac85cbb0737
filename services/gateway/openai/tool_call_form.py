"""Makes the constraint for tool calls: a grammar that limits which tokens the engine may draw.

If the grammar is refused, the error names the tool at fault.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pdmesh.core.sampling.constraint import Constraint
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.engine.grammars.asked_grammars import AskedGrammar, GrammarKind
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.schema import ChatCompletionRequest
from pdmesh.services.gateway.openai.tools import NamedTool
from pdmesh.services.gateway.request.answer_form import constraint_of
from pdmesh.services.gateway.request.frontend import Frontend
from pdmesh.services.gateway.request.spec import ServedModel


async def call_constraint(
    calls: AskedGrammar,
    request: ChatCompletionRequest,
    model: ServedModel,
    frontend: Frontend,
    tenant: Tenant,
) -> Constraint | None:
    """The constraint for `calls`, the grammar of all tool calls.

    If the grammar is refused, the schema of one tool may be the cause. So each tool's schema is
    compiled by itself, in order. The error for the first bad schema names its tool. Raises
    InvalidRequest with the field, or Overloaded.
    """
    try:
        return await constraint_of(calls, model, frontend, tenant)
    except InvalidRequest as exc:
        if exc.reason != "GRAMMAR_REFUSED":
            raise
        refusal = exc
    for schema in _schemas(calls, request):
        await constraint_of(schema, model, frontend, tenant)
    raise refusal


def _schemas(calls: AskedGrammar, request: ChatCompletionRequest) -> Iterator[AskedGrammar]:
    """The tools' argument schemas, as far as they are part of the grammar `calls`."""
    chosen = request.tool_choice
    for index, tool in enumerate(request.tools or ()):
        if (function := tool.function) is None or function.parameters is None:
            continue
        if isinstance(chosen, NamedTool) and chosen.function.name != function.name:
            continue
        if function.strict or calls.kind is GrammarKind.JSON:
            text = msgspec.json.encode(function.parameters).decode()
            field = f"tools[{index}].function.parameters"
            yield AskedGrammar(GrammarKind.JSON, text, field)
