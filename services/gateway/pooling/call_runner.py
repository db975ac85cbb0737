"""Runs calls for vectors or scores: charges the tenant, sends the batches, reports the call.

A scenario is a kind of requests with its own instances.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pdmesh.core.kv.prefix.block_hash import tenant_root, tokens_to_bytes
from pdmesh.core.pooling.batch_life import ModelReplaced
from pdmesh.core.pooling.batches import batches
from pdmesh.core.tenancy.charged_tokens import tokens_of_inputs
from pdmesh.errors import InvalidRequest, MeshError, Overloaded, PoisonRequest, ScenarioNotFound
from pdmesh.net.tasks import end
from pdmesh.services.gateway.access.access_control import Permit, charged
from pdmesh.services.gateway.pooling.batch import BatchIdentity, PoolingBatch
from pdmesh.services.gateway.pooling.report import PoolingReport, report_call, start_span
from pdmesh.services.gateway.pooling.spec import PoolingAnswer, PoolingSpec
from pdmesh.services.gateway.request.frontend import Frontend
from pdmesh.telemetry import traces
from pdmesh.v1.instance_service_pb2 import Pooled

MAX_VALUES: Final = 1 << 23  # how many numbers one answer may have (32 MiB)
MAX_OPEN_BYTES: Final = 256 << 20  # for the inputs and answers of all open calls together
_MOST_REVISIONS: Final = 3  # how many revisions of the model one call may try
_WIDTH: Final = 8  # how many open batches a call may have, so that it cannot take every slot


class CallerGone(Exception):
    """The client has gone."""


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call that `Frontend` can end."""

    ended: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def cancel(self, error: MeshError | None = None) -> None:
        """End the call with this error. None means that the client has gone."""
        if not self.ended.done():
            self.ended.set_exception(error or CallerGone())
            self.ended.exception()  # otherwise asyncio logs the error if the call is already over


class CallRunner:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend, self._shared = frontend, frontend.shared
        self.num_open_bytes = 0  # the inputs and answers of all open calls

    @contextlib.asynccontextmanager
    async def answered(
        self,
        spec: PoolingSpec,
        permit: Permit,
        request_id: str,
        traceparent: str,
        watch: Callable[[Callable[[], None]], None],
    ) -> AsyncIterator[PoolingAnswer]:
        """A context manager that gives the answer. The call is open until the context ends.

        `watch` gets a callback, which must be called when the client has gone. Raises MeshError, or
        CallerGone if the client has gone.
        """
        self._frontend.check_open()
        spec = self._with_scenario(spec)
        num_values = len(spec.inputs) * spec.num_values
        if num_values > MAX_VALUES:
            message = f"the answer would have {num_values} numbers, and may have {MAX_VALUES}"
            raise InvalidRequest(f"{message}: send fewer inputs at once", field=spec.field)
        places = list(batches([len(tokens) for tokens in spec.inputs]))
        if self._shared.poison:
            self._refuse_poison(spec, places)
        num_bytes = 4 * (num_values + spec.num_tokens)
        if self.num_open_bytes + num_bytes > MAX_OPEN_BYTES:
            raise Overloaded("too many large calls for vectors are open")
        self.num_open_bytes += num_bytes
        call = OpenCall()
        try:
            await charged(permit, lambda: self._take_in(call, permit, spec.num_tokens))
            report = PoolingReport(spec, request_id, start_span(spec, traceparent))
            watch(call.cancel)
            yield await self._answer(places, report, call, permit)
        finally:
            self._frontend.let_go(call)
            self.num_open_bytes -= num_bytes

    def _take_in(self, call: OpenCall, permit: Permit, num_tokens: int) -> None:
        """Charge the tenant and open the call.

        The charge may have been refused before and tried again. So the gateway may have become full
        or begun to drain since the first check, and is checked again.
        """
        self._frontend.check_open()
        permit.charge(num_tokens)
        self._frontend.take_in(call)

    async def _answer(
        self, places: Sequence[range], report: PoolingReport, call: OpenCall, permit: Permit
    ) -> PoolingAnswer:
        done: list[PoolingBatch] = []
        try:
            answer = await self._of_one_model(places, report, call, done)
            report.outcome, report.reason = "completed", "stop"
            report.num_cached_tokens = answer.num_cached_tokens
            return answer
        except CallerGone:
            report.outcome, report.reason = "cancelled", "CLIENT_GONE"
            raise
        except MeshError as exc:
            report.outcome, report.reason = "failed", exc.reason
            raise
        finally:
            permit.settle(_num_used_tokens(report, done))
            self._judge(report.spec, done)
            report_call(self._frontend.observer, report, done)

    async def _of_one_model(
        self,
        places: Sequence[range],
        report: PoolingReport,
        call: OpenCall,
        out: list[PoolingBatch],
    ) -> PoolingAnswer:
        """Compute all inputs with one revision of the model.

        If the revision is replaced before all inputs are computed, start again with another one.
        """
        for _ in range(_MOST_REVISIONS):
            report.spec = self._pinned(report.spec)
            try:
                return await self._all(places, report, call, out)
            except ModelReplaced:
                if not self._shared.budget.spend():
                    raise
        raise ModelReplaced("the model was replaced several times during this call")

    def _pinned(self, spec: PoolingSpec) -> PoolingSpec:
        needs = self._shared.fleet.pooling.pinned(spec.needs, self._shared.sessions.num_open)
        return replace(spec, model=needs.model, canary=needs.canary)

    async def _all(
        self,
        places: Sequence[range],
        report: PoolingReport,
        call: OpenCall,
        out: list[PoolingBatch],
    ) -> PoolingAnswer:
        spec = report.spec
        gate = asyncio.Semaphore(_WIDTH)
        traceparent = traces.traceparent(report.span)
        salt = tenant_root(
            self._shared.hash_secret, spec.tenant.name, spec.cache_salt, spec.model.fingerprint, ""
        ).hex()

        async def one(number: int, of: range) -> Pooled:
            async with gate:
                name = report.request_id if not number else f"{report.request_id}-{number}"
                identity = BatchIdentity(name, traceparent, salt, report.started_at)
                batch = PoolingBatch(self._shared, spec, of, identity)
                out.append(batch)
                self._shared.budget.earn()
                return await batch.run()

        tasks = [asyncio.create_task(one(number, each)) for number, each in enumerate(places)]
        try:
            found = await _results(tasks, call.ended)
        finally:
            await end(tasks)
            await asyncio.gather(*tasks, return_exceptions=True)  # otherwise asyncio logs errors
        num_cached = sum(each.num_cached_tokens for each in found)
        return PoolingAnswer(
            [each.values for each in found], spec.num_values, len(spec.inputs), num_cached
        )

    def _with_scenario(self, spec: PoolingSpec) -> PoolingSpec:
        """Choose the scenario if the call names none. Raises ScenarioNotFound."""
        fleet = self._shared.fleet.pooling
        if not spec.scenario:
            return replace(spec, scenario=fleet.scenario_of(spec.model.name))
        if fleet.is_served_elsewhere(spec.model.name, spec.scenario):
            message = f"{spec.model.name} is not served for this scenario"
            raise ScenarioNotFound(message, field="scenario")
        return spec

    def _refuse_poison(self, spec: PoolingSpec, places: Sequence[range]) -> None:
        now = time.monotonic()
        if any(self._shared.poison.is_poison(self._digest(spec, each), now) for each in places):
            raise PoisonRequest("instances died recently while they worked on these inputs")

    def _judge(self, spec: PoolingSpec, done: Sequence[PoolingBatch]) -> None:
        """Record each batch that killed instances, and clear the records of answered batches."""
        poison = self._shared.poison
        for batch in done:
            if batch.life.is_answered:
                if poison:
                    poison.clear(self._digest(spec, batch.places))
            elif batch.life.victims:
                digest = self._digest(spec, batch.places)
                poison.add(digest, batch.life.victims, time.monotonic())

    def _digest(self, spec: PoolingSpec, places: range) -> bytes:
        """A keyed hash of tenant and inputs, which reveals nothing about the inputs."""
        key = hmac.digest(self._shared.hash_secret, spec.tenant.name.encode(), "sha256")
        state = hashlib.blake2b(digest_size=16, key=key, person=b"pool")
        for place in places:
            tokens = spec.inputs[place]
            state.update(len(tokens).to_bytes(4, "little") + tokens_to_bytes(tokens))
        return state.digest()


def _num_used_tokens(report: PoolingReport, done: Sequence[PoolingBatch]) -> int:
    begun = (place for batch in done if batch.accepted_at for place in batch.places)
    return tokens_of_inputs(report.outcome, [len(tokens) for tokens in report.spec.inputs], begun)


async def _results(
    tasks: Sequence[asyncio.Task[Pooled]], ended: asyncio.Future[None]
) -> list[Pooled]:
    """Wait for all results. Raises the error of the first task that fails, or of `ended`."""
    pending: set[asyncio.Future[Pooled] | asyncio.Future[None]] = {*tasks, ended}
    while any(not task.done() for task in tasks):
        finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for each in finished:
            each.result()
    return [task.result() for task in tasks]
