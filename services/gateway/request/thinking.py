"""Makes a call's thinking budget, which limits how many tokens of reasoning an answer may have.

The client sends the number of tokens. The model's reasoning parser knows the tokens that mark the
beginning and the end of the reasoning.
"""

from __future__ import annotations

from typing import Final

from pdmesh.core.sampling.thinking_budget import MAX_BUDGET, ThinkingBudget
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.request.frontend import Frontend
from pdmesh.services.gateway.request.spec import ServedModel

_FIELD: Final = "thinking_token_budget"
_UNLIMITED: Final = -1


async def thinking_budget_of(
    asked: int | None, model: ServedModel, frontend: Frontend
) -> ThinkingBudget | None:
    """The budget of a call. None if the reasoning is unlimited. Raises MeshError."""
    if asked is None or asked == _UNLIMITED:
        return None
    if not 0 <= asked <= MAX_BUDGET:
        message = f"{_FIELD} must be between 0 and {MAX_BUDGET}, or -1 for no limit"
        raise InvalidRequest(message, field=_FIELD)
    if _FIELD in frontend.shared.fleet.unsupported_shaping(model.name):
        raise _unsupported("is not supported by this model's engine as it is set up")
    parsers = frontend.shared.parsers
    found = parsers.model(model.tokenizer)
    if not found.names.reasoning:
        raise _unsupported(f"needs a model with a reasoning parser: {model.name} has none")
    if not parsers.is_installed:
        raise _unsupported("needs vLLM where the gateway runs")
    try:
        marks = await parsers.thinking_marks(found)
    except InvalidRequest as exc:
        raise _unsupported(f"is not supported with this model's reasoning parser: {exc}") from exc
    return ThinkingBudget(asked, marks)


def _unsupported(what: str) -> InvalidRequest:
    return InvalidRequest(f"{_FIELD} {what}", reason="UNSUPPORTED_FIELD", field=_FIELD)
