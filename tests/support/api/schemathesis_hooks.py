"""A hook for Schemathesis, which sends random requests to the gateway's HTTP API.

The hook replaces a random model name by the name of an existing model. Otherwise the gateway would
refuse nearly all requests because of their model. A name that is too long stays.
"""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) <= 256:
        body["model"] = "default"
    return body
