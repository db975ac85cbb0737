"""A chat made from another API's request. Its errors name the fields of that request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.schema import ChatCompletionRequest

# Maps a field of the chat to the field of the other request from which it was made.
FieldNames = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TranslatedChat:
    chat: ChatCompletionRequest
    names: FieldNames = field(default_factory=dict)

    def naming(self) -> AbstractContextManager[None]:
        """Within this context, errors name the fields of the other request."""
        return naming(self.names)


@contextmanager
def naming(names: FieldNames) -> Iterator[None]:
    """Within this context, errors name the fields of the other request."""
    try:
        yield
    except InvalidRequest as exc:
        known, name = exc.field, name_of(exc.field or "", names)
        if known and name != known:
            exc.message = exc.message.replace(known, name, 1)
            exc.field, exc.args = name, (exc.message,)
        raise


def name_of(known: str, names: FieldNames) -> str:
    prefix = known
    while prefix:
        if (name := names.get(prefix)) is not None:
            return name + known[len(prefix) :]
        prefix = prefix[: max(prefix.rfind("."), prefix.rfind("["), 0)]
    return known
