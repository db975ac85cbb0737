"""Plans that one gateway's endpoint picker gets and another gateway uses.

An endpoint picker tells a proxy in front of the mesh which gateway takes a request. The picker also
asks the master for a plan: the instances that may serve the request. The proxy passes the plan to
the gateway in a header. The gateway takes over the plan and its request id, because the master has
already counted the request as load of these instances, under this id.

A client could forge this header. So the plan is signed with a key derived from a secret of the
mesh. A plan is for one prompt of one tenant, expires after some seconds, and is used at most once
by each gateway. The gateway ignores a header without a valid plan, and asks the master as usual.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from pdmesh.telemetry import metrics, names
from pdmesh.v1.scheduler_service_pb2 import HandedPlan

PLAN_HEADER: Final = "x-pdmesh-plan"
LIFE_S: Final = 10.0  # from the issue of the plan until the gateway has the whole body
_SKEW_S: Final = 5.0  # the most that the clocks of two gateways may differ
_MAX_USED: Final = 65_536
_MAX_CHARS: Final = 8192
_MAC_BYTES: Final = 32
_REQUEST_ID: Final = re.compile(r"req-[0-9a-f]{1,64}")  # the id is written to headers and logs
_PURPOSE: Final = b"pdmesh endpoint picker's plan, v1"

_ignored = metrics.counter(
    names.GATEWAY_HANDED_IGNORED,
    "Plans of an endpoint picker that were not used, by reason: forged, expired, used, other",
)


class HandedPlans:
    """Signs and checks plans.

    `secret` is the key of the block hashes, from which the key of the signatures is derived.
    `clock` is the wall clock, in seconds.
    """

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        self._key = hmac.digest(secret, _PURPOSE, "sha256")
        self._clock = clock
        self._used: OrderedDict[str, float] = OrderedDict()  # request ids, until they expire

    def issue(self, plan: HandedPlan) -> str:
        """Return the header's value for a plan. This sets the plan's `expires_at_ms`."""
        plan.expires_at_ms = int((self._clock() + LIFE_S) * 1000)
        payload = plan.SerializeToString()
        return base64.urlsafe_b64encode(payload + self._mac(payload)).decode()

    def take(self, header: str) -> HandedPlan | None:
        """The plan in a header's value. None if the plan is not valid or was taken before."""
        if not header:
            return None
        plan, reason = self._opened(header)
        if plan is None:
            _ignored.add(1, {names.ATTR_REASON: reason})
        return plan

    def fits(self, plan: HandedPlan, other: HandedPlan) -> bool:
        """Whether the plan is for the same request as `other`, and has not expired.

        The prompt, tenant, model, adapter, scenario and length of the answer must match.
        """
        is_same = all(getattr(plan, name) == getattr(other, name) for name in _OF_THE_REQUEST)
        reason = "" if is_same else "other"
        if is_same and not self._is_in_time(plan):
            reason = "expired"
        if reason:
            _ignored.add(1, {names.ATTR_REASON: reason})
        return not reason

    def _opened(self, header: str) -> tuple[HandedPlan | None, str]:
        plan = self._signed(header)
        if plan is None:
            return None, "forged"
        now, request_id = self._clock(), plan.result.request_id
        if not _REQUEST_ID.fullmatch(request_id):
            return None, "forged"
        if not self._is_in_time(plan):
            return None, "expired"
        self._forget(now)
        if request_id in self._used:
            return None, "used"
        self._used[request_id] = plan.expires_at_ms / 1000 + _SKEW_S
        return plan, ""

    def _is_in_time(self, plan: HandedPlan) -> bool:
        now = self._clock()
        return now - _SKEW_S < plan.expires_at_ms / 1000 < now + LIFE_S + _SKEW_S

    def _signed(self, header: str) -> HandedPlan | None:
        if len(header) > _MAX_CHARS:
            return None
        try:
            data = base64.b64decode(header, b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        payload, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(payload)):
            return None
        try:
            return HandedPlan.FromString(payload)
        except DecodeError:  # a plan from another release
            return None

    def _forget(self, now: float) -> None:
        """Remove expired ids, and the oldest ids if there are too many.

        The loop ends at the first id that has not expired, because ids expire nearly in the order
        in which they were added.
        """
        while self._used:
            request_id, until = next(iter(self._used.items()))
            if until >= now and len(self._used) < _MAX_USED:
                return
            del self._used[request_id]

    def _mac(self, payload: bytes) -> bytes:
        return hmac.new(self._key, payload, hashlib.sha256).digest()


_OF_THE_REQUEST: Final = (
    "prompt_digest", "model", "adapter_digest", "scenario", "max_tokens",
)  # fmt: skip
