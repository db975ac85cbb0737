"""Wraps each method of AdminService in the steps that gRPC and the operators' page both need.

The caller and the caller's role are checked before the method runs. If the method changed
something, the change is reported afterwards.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import Message

from pdmesh.core.access.operator_roles import refusal
from pdmesh.errors import NotAllowed
from pdmesh.services.master_scheduler.admin.audit import AuditTrail, Changed
from pdmesh.services.master_scheduler.admin.callers import AdminAccess, AdminCaller
from pdmesh.services.master_scheduler.admin.servicer import AdminServicer
from pdmesh.v1 import admin_service_pb2

log = structlog.get_logger(__name__)

_SERVICE: Final = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
Context = grpc.aio.ServicerContext[Any, Any]


class CheckedCalls:
    """Has an attribute for each method of the service: a function of (request, context)."""

    def __init__(self, servicer: AdminServicer, access: AdminAccess, audit: AuditTrail) -> None:
        self._servicer, self._access, self._audit = servicer, access, audit
        for method in _SERVICE.methods:
            setattr(self, method.name, partial(self._call, method.name))

    async def check_access(self, method: str, context: Context) -> AdminCaller:
        """Identify the caller and check the role.

        Raises NotAllowed, InvalidToken or Unavailable.
        """
        caller = await self._access.caller(context)
        if why := refusal(method, caller.role, caller.who):
            log.warning(
                "admin.refused",
                who=caller.who,
                shown_by=caller.shown_by,
                action=method,
                address=caller.address,
                reason=why,
            )
            raise NotAllowed(why)
        return caller

    async def _call(self, method: str, request: Message, context: Context) -> Message:
        caller = await self.check_access(method, context)
        answer = await getattr(self._servicer, method)(request, caller)
        if isinstance(answer, Changed):
            await self._audit.tell(caller, method, answer)
            answer = answer.answer
        assert isinstance(answer, Message)
        return answer
