"""The latest requests that ended, and the errors that instances reported, by request id."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pdmesh.core.history.ended_request import EndedRequest, InstanceLoss, key_of
from pdmesh.core.history.request_story import MAX_STEPS, Step, stages

MAX_REQUESTS: Final = 10_000
_MAX_IN_TROUBLE: Final = 1_000  # the most requests with errors
_MAX_ERRORS: Final = 32  # the most errors of one request


@dataclass(slots=True)
class RecentRequests:
    """At a bound, the oldest request is dropped. Beyond _MAX_ERRORS, new errors of a request are
    dropped. Times are seconds since 1970.
    """

    _ended: OrderedDict[str, tuple[float, EndedRequest]] = field(default_factory=OrderedDict)
    _errors: OrderedDict[str, list[Step]] = field(default_factory=OrderedDict)

    def ended(self, request: EndedRequest, at: float) -> None:
        key = key_of(request.request_id)
        self._ended.pop(key, None)
        self._ended[key] = (at, request)
        if len(self._ended) > MAX_REQUESTS:
            self._ended.popitem(last=False)

    def failed_at(self, instance_id: str, request_id: str, what: str, at: float) -> None:
        """An instance reported an error of a request."""
        key = key_of(request_id)
        steps = self._errors.setdefault(key, [])
        if len(steps) < _MAX_ERRORS:
            steps.append(Step(at, instance_id, what))
        if len(self._errors) > _MAX_IN_TROUBLE:
            self._errors.popitem(last=False)

    def of(self, request_id: str) -> EndedRequest | None:
        found = self._ended.get(key_of(request_id))
        return None if found is None else found[1]

    def story(self, request_id: str) -> list[Step]:
        """The steps of a request by time. The list is empty if the request is unknown.

        While the request runs, the only steps are errors.
        """
        key = key_of(request_id)
        steps = list(self._errors.get(key, ()))
        if found := self._ended.get(key):
            at, request = found
            steps += stages(_report(request), request.gateway_id, at)
        return sorted(steps, key=lambda step: step.at)[:MAX_STEPS]


def _report(request: EndedRequest) -> dict[str, Any]:
    """The request with the fields of a line of the gateway's log."""
    return asdict(request) | {"losses": [_loss(loss) for loss in request.losses]}


def _loss(loss: InstanceLoss) -> dict[str, Any]:
    return asdict(loss) | {"instances": loss.instance_ids}
