"""Read by Schemathesis: a request that names a model at random names the one there is.

Else nearly all of them would be refused for their model alone.
"""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) <= 256:
        body["model"] = "default"
    return body
