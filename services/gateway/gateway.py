"""Puts a gateway together from its parts, and runs it from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog

from pdmesh.core.request.poison import PoisonBook
from pdmesh.core.request.retry_budget import RetryBudget
from pdmesh.httpd.bounds import Bounds
from pdmesh.httpd.server import HttpServer, listen
from pdmesh.net.registry import RecordChanged
from pdmesh.net.tasks import end
from pdmesh.service_process import StartupError
from pdmesh.services.gateway.access.access_control import AccessControl, OpenAccess
from pdmesh.services.gateway.grpc.service import GrpcBounds, GrpcServer
from pdmesh.services.gateway.http.app import HttpApp
from pdmesh.services.gateway.http.exchange import BodyRoom
from pdmesh.services.gateway.http.responses.store import KeepBounds, ResponseStore
from pdmesh.services.gateway.http.serving.intake import HttpBounds
from pdmesh.services.gateway.images.fetching import FetchBounds, Fetcher
from pdmesh.services.gateway.images.loading import Images
from pdmesh.services.gateway.parsing.answer_parsing import AnswerParsers
from pdmesh.services.gateway.parsing.early_start import EarlyStart
from pdmesh.services.gateway.parsing.parser_process import ParserProcess
from pdmesh.services.gateway.picker.server import PickerAddress, PickerServer
from pdmesh.services.gateway.picker.servicer import PickerBounds, PickerServicer
from pdmesh.services.gateway.request.answer_kv import AnswerKv
from pdmesh.services.gateway.request.frontend import Frontend
from pdmesh.services.gateway.request.generation import Collaborators
from pdmesh.services.gateway.request.observer import Observer, Publisher
from pdmesh.services.gateway.request.waiting import Waiting
from pdmesh.services.gateway.routing.fleet import FleetView, MeshView
from pdmesh.services.gateway.routing.handed_plans import HandedPlans
from pdmesh.services.gateway.routing.planner import Planner
from pdmesh.services.gateway.routing.scenarios import PrefixMatches, ScenarioChooser
from pdmesh.services.gateway.routing.session_hints import SessionHints
from pdmesh.services.gateway.routing.sessions import SessionPool
from pdmesh.services.gateway.settings import Settings
from pdmesh.services.gateway.text.tokenizer import Tokenizer
from pdmesh.services.gateway.text.tokenizer_pool import TokenizerPool
from pdmesh.telemetry import metrics, names

_HEALTH_S: Final = 0.25
log = structlog.get_logger(__name__)


class Gateway:
    """`not_ready` returns the names of the conditions that `/health/ready` still waits for."""

    def __init__(
        self,
        settings: Settings,
        mesh: MeshView,
        tokenizers: TokenizerPool,
        publisher: Publisher | None,
        not_ready: Callable[[], list[str]],
        access: AccessControl | None = None,
    ) -> None:
        self._access = access or OpenAccess()
        gateway_id = settings.instance_id
        self._settings = settings
        self.fleet = FleetView(mesh, settings.model, time.monotonic, settings.region, gateway_id)
        self.slos = settings.slos
        parsers = AnswerParsers(settings.tool_parser, settings.reasoning_parser, ParserProcess())
        self.parser_start = EarlyStart(
            parsers,
            self.fleet.served_texts,
            self._tokenizer_of,
            is_for_tools=settings.parsers_for_tools,
        )
        self._room = Waiting(settings.max_waiting, settings.prefill_batch)
        self._poison = PoisonBook()
        self.sessions = SessionPool(gateway_id, self._on_slots_freed)
        self._planner = Planner(
            self.fleet,
            gateway_id,
            self.sessions.num_open,
            lambda: self._room.queues,
            timeout_s=settings.plan_timeout_s,
            max_staleness_s=settings.max_staleness_s,
        )
        self._matches = PrefixMatches(self.fleet, gateway_id, timeout_s=settings.plan_timeout_s)
        self.observer = Observer(gateway_id, publisher)
        secret = settings.hash_secret.get_secret_value().encode()
        keys = itertools.count(1)
        shared = Collaborators(
            fleet=self.fleet,
            sessions=self.sessions,
            planner=self._planner,
            room=self._room,
            tokenizers=tokenizers,
            budget=RetryBudget(settings.retry_ratio, settings.retry_reserve),
            limits=settings.limits,
            slos=self.slos,
            poison=self._poison,
            hash_secret=secret,
            next_key=lambda: next(keys),
            kv_transfer=settings.kv_transfer_of,
            parsers=parsers,
            images=_images(settings),
            answer_kv=AnswerKv(self.fleet, self.sessions, is_on=settings.give_answer_kv),
            session_hints=SessionHints(self.fleet, self.sessions, hold_s=settings.session_hold_s),
            handed_plans=None if settings.picker_port is None else HandedPlans(secret),
        )
        self.frontend = Frontend(
            shared,
            self.observer,
            default_max_tokens=settings.default_max_tokens,
            max_calls=settings.max_calls,
            chunk_interval_s=settings.chunk_interval_ms / 1000,
            scenarios=ScenarioChooser(settings.rules, self.fleet, self._matches),
        )
        self.http_app = _http_app(settings, self.frontend, self._access, not_ready)
        self._bounds = _bounds(settings)
        self.http = _http_server(settings, self.http_app, self._bounds)
        self.grpc = _grpc_server(settings, self.frontend, self._access)
        self.picker = _picker(settings, self.frontend, self._access, self.http_app.body_room)
        self._not_ready = not_ready
        self._tasks: list[asyncio.Task[None]] = []
        mesh.records.on_change(self._on_record_changed)
        self._make_gauges()

    @property
    def loops(self) -> Sequence[asyncio.Task[None]]:
        """Tasks that run as long as the gateway. If one of them ends, the gateway cannot serve."""
        return self._tasks

    async def start(self) -> None:
        loops = (
            self._planner.run(),
            self.observer.run(),
            self.http_app.run(),
            self.grpc.run(),
            self._access.run(),
            self._tell_health(),
        )
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        if self.parser_start.is_of_use:
            self._tasks.append(asyncio.create_task(self.parser_start.run()))
        self.http.start()
        await self.grpc.start()
        if self.picker is not None:
            await self.picker.start()

    async def _tell_health(self) -> None:
        while True:
            self.fleet.staleness_s()  # must be called often, to notice that the view is connected
            self.grpc.set_serving(not self._not_ready())
            await asyncio.sleep(_HEALTH_S)

    async def stop(self) -> None:
        """Refuse new calls, let streams finish for `drain_s`, end the rest, and close all parts."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.frontend.drain(self._settings.drain_s))
            tasks.create_task(self.http.stop())
            tasks.create_task(self.grpc.stop(self._settings.drain_s + 1))
            if self.picker is not None:
                tasks.create_task(self.picker.stop(self._settings.drain_s + 1))
        await end(self._tasks)
        await self.frontend.shared.parsers.close()
        await self._access.close()
        await self.http_app.close()
        await self.observer.publish_rest()
        await self.sessions.close()
        await self._planner.close()
        await self._matches.close()
        await self.frontend.shared.grammars.close()
        await self.frontend.shared.tokenizers.close()

    async def _tokenizer_of(self, model: str) -> Tokenizer:
        """Raises MeshError."""
        fleet = self.fleet
        return await self.frontend.shared.tokenizers.get(
            model, fleet.text_of(model), lambda: fleet.text_sources(model)
        )

    def _on_slots_freed(self, instance_id: str, num_free: int) -> None:
        self._room.slots_freed(instance_id, num_free)

    def _on_record_changed(self, change: RecordChanged) -> None:
        self._access.share(self.fleet.gateways())
        with contextlib.suppress(RuntimeError):  # the loop is closing
            self.sessions.forget_gone(lambda i, inc: self.fleet.record(i, inc) is not None)

    def _make_gauges(self) -> None:
        queues = self.frontend.shared.tokenizers.queues

        def sessions() -> float:
            return self.sessions.counts()[0]

        def legs() -> float:
            return self.sessions.counts()[1]

        def plans() -> Iterable[tuple[float, dict[str, str]]]:
            yield self._planner.num_planned, {"source": "master"}
            yield self._planner.num_fallbacks, {"source": "fallback"}
            yield self._planner.num_handed, {"source": "picker"}

        metrics.gauge(
            names.WAITING_REQUESTS, "Choices waiting for a slot, by priority", self._room.depths
        )
        metrics.gauge(
            names.GATEWAY_POISON,
            "Prompts that are refused because instances died of them",
            lambda: len(self._poison),
        )
        metrics.gauge(
            names.GATEWAY_CONNECTIONS, "Open HTTP connections", lambda: self._bounds.num_open
        )
        metrics.total(
            names.GATEWAY_CONNECTIONS_REFUSED,
            "HTTP connections refused: too many from one address, or in total",
            lambda: self._bounds.num_refused,
        )
        metrics.gauge(
            names.GATEWAY_ENCODING,
            "Characters that wait to be tokenized",
            lambda: queues.num_pending_chars + queues.num_bulk_chars,
        )
        metrics.gauge(
            names.GATEWAY_INCOMING,
            "Bytes of large bodies being read",
            lambda: self.http_app.body_room.num_bytes,
            "By",
        )
        metrics.gauge(
            names.GATEWAY_IMAGES_HELD,
            "Bytes of the images of open requests",
            lambda: self.frontend.shared.images.num_bytes,
            "By",
        )
        metrics.gauge(names.REQUESTS_IN_FLIGHT, "Open calls", lambda: self.frontend.num_calls)
        metrics.gauge(names.GATEWAY_SESSIONS, "Sessions with instances", sessions)
        metrics.gauge(names.GATEWAY_LEGS, "Open legs over all sessions", legs)
        metrics.total(names.GATEWAY_PLANS, "Plans, by source: master, fallback, picker", plans)


def _images(settings: Settings) -> Images:
    rules = settings.image_rules
    return Images(
        rules,
        Fetcher(rules, FetchBounds(settings.image_fetch_timeout_s)),
        max_count=settings.max_images,
        max_request_bytes=settings.max_image_bytes,
        max_held_bytes=settings.max_held_image_bytes,
    )


def _http_app(
    settings: Settings,
    frontend: Frontend,
    access: AccessControl,
    not_ready: Callable[[], list[str]],
) -> HttpApp:
    bounds = HttpBounds(
        max_body_bytes=settings.max_body_bytes,
        max_incoming_bytes=max(settings.max_incoming_bytes, settings.max_body_bytes),
        write_timeout_s=settings.write_timeout_s,
        is_strict=settings.strict_fields,
    )
    kept = KeepBounds(
        settings.responses_ttl_s,
        settings.responses_max_count,
        settings.responses_max_bytes,
        settings.responses_max_total_bytes,
    )
    store = ResponseStore(settings.redis_url, kept)
    return HttpApp(frontend, access, not_ready, bounds, store)


def _bounds(settings: Settings) -> Bounds:
    return Bounds(
        max_header_bytes=settings.max_header_bytes,
        receive_timeout_s=settings.receive_timeout_s,
        max_connections=settings.max_connections,
        max_connections_per_ip=settings.max_connections_per_ip,
    )


def _http_server(settings: Settings, app: HttpApp, bounds: Bounds) -> HttpServer:
    host, port = settings.host, settings.http_port
    try:
        listener = listen(
            host, port, write_timeout_s=settings.write_timeout_s, reuse_port=settings.reuse_port
        )
    except OSError as exc:
        message = f"cannot listen on {host}:{port} ({exc.strerror}); set PDMESH_GATEWAY_HTTP_PORT"
        raise StartupError(message) from exc
    return HttpServer(app, listener, bounds, shutdown_s=settings.drain_s + 2)


def _grpc_server(settings: Settings, frontend: Frontend, access: AccessControl) -> GrpcServer:
    return GrpcServer(
        frontend,
        access,
        settings.host,
        settings.grpc_port,
        GrpcBounds(
            max_bytes=settings.max_body_bytes,
            max_incoming_bytes=settings.max_incoming_bytes,
            max_connections=settings.max_connections,
            receive_timeout_s=settings.receive_timeout_s,
            write_timeout_s=settings.write_timeout_s,
        ),
        reuse_port=settings.reuse_port,
    )


def _picker(
    settings: Settings, frontend: Frontend, access: AccessControl, room: BodyRoom
) -> PickerServer | None:
    plans = frontend.shared.handed_plans
    if plans is None or settings.picker_port is None:
        return None
    if why := settings.why_no_picker:
        raise StartupError(why)
    is_certified = settings.picker_callers == "certified"
    bounds = PickerBounds(
        settings.max_body_bytes, settings.receive_timeout_s, settings.strict_fields, is_certified
    )
    at = PickerAddress(
        settings.inner_host,
        settings.picker_port,
        settings.max_connections,
        settings.max_body_bytes,
        is_certified,
        settings.reuse_port,
    )
    return PickerServer(PickerServicer(frontend, access, plans, room, bounds), at)
