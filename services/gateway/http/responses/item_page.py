"""A page of the input items of a kept response, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pdmesh.errors import InvalidRequest, shortened
from pdmesh.services.gateway.http.responses.schema import InputItem

_MAX_LIMIT: Final = 100
_ORDERS: Final = ("asc", "desc")
_item: Final = msgspec.json.Decoder(InputItem)

# A JSON object to be encoded, with values of any type.
Json = dict[str, Any]
# The query's fields and their schemas.
ITEM_QUERY: Final[Mapping[str, Json]] = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": _MAX_LIMIT},
    "order": {"enum": [*_ORDERS]},
}


def item_page(items: Sequence[msgspec.Raw], query: Mapping[str, str]) -> Json:
    """A page of `items`, which begin with the oldest. Raises InvalidRequest with the field.

    By default, the page has all items and begins with the newest. In the query, `after` is the id
    of the last item of the previous page.
    """
    limit = _limit(query.get("limit"))
    order = query.get("order", "desc")
    if order not in _ORDERS:
        raise InvalidRequest(f"order is one of {', '.join(_ORDERS)}", field="order")
    shown = list(items if order == "asc" else reversed(items))
    ids = [_item.decode(raw).id for raw in shown]
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise InvalidRequest(f"no item has the id {shortened(after)}", field="after")
        begin = ids.index(after) + 1
        shown, ids = shown[begin:], ids[begin:]
    page = ids[:limit]
    return {
        "object": "list",
        "data": shown[:limit],
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
        "has_more": len(page) < len(ids),
    }


def _limit(given: str | None) -> int | None:
    if given is None:
        return None
    is_number = given.isascii() and given.isdigit() and len(given) <= len(str(_MAX_LIMIT))
    if not (is_number and 1 <= int(given) <= _MAX_LIMIT):
        raise InvalidRequest(f"limit must be between 1 and {_MAX_LIMIT}", field="limit")
    return int(given)
