"""A chat made from another API's request. Its errors name the fields of that request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.schema import ChatCompletionRequest


@dataclass(frozen=True, slots=True)
class TranslatedChat:
    """`names`: by the chat's fields, the names of the request's fields that they come from."""

    chat: ChatCompletionRequest
    names: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Within this context, errors name the fields of the request."""
        try:
            yield
        except InvalidRequest as exc:
            known, name = exc.field, self.name_of(exc.field or "")
            if known and name != known:
                exc.message = exc.message.replace(known, name, 1)
                exc.field, exc.args = name, (exc.message,)
            raise

    def name_of(self, known: str) -> str:
        prefix = known
        while prefix:
            if (name := self.names.get(prefix)) is not None:
                return name + known[len(prefix) :]
            prefix = prefix[: max(prefix.rfind("."), prefix.rfind("["), 0)]
        return known
