"""Opens and closes the calls of clients, which come over HTTP or gRPC.

A call has one choice or several. A choice is one answer to one prompt, and a `Generation` produces
its text. `Frontend.open` starts a call, `Call.changed` waits for output, and `Call.take` returns
the output of all choices. The API that opened a call must close it. Closing frees everything that
the call still holds (F27).

A plan names the instances that may serve a call. An endpoint picker is a service in front of the
gateways, and may get the plan from the master before the gateway does. A scenario is a kind of
requests with its own instance groups and objectives, such as a time to first token (TTFT). A
pooling model makes vectors or scores of texts.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from msgspec.structs import replace
from opentelemetry.trace import Span

from pdmesh.core.placement.plan import DEFAULT_SCENARIO
from pdmesh.core.pooling.facts import PoolingFacts
from pdmesh.core.request.call_outcome import EndedChoice, call_outcome
from pdmesh.core.request.events import Complete, Fail
from pdmesh.core.request.slo import Slos, is_ttft_met
from pdmesh.core.sampling.answer_length import max_answer_tokens
from pdmesh.core.tenancy.charged_tokens import ChoiceUse, tokens_of_answers
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.errors import (
    Draining,
    InvalidRequest,
    MeshError,
    NoInstance,
    Overloaded,
    PoisonRequest,
)
from pdmesh.services.gateway.access.access_control import ANYONES_PERMIT, Permit, check_model
from pdmesh.services.gateway.request.bounds import (
    check_allowed_ids,
    check_grammars,
    context_exceeded,
)
from pdmesh.services.gateway.request.generation import Collaborators, Generation, unheard
from pdmesh.services.gateway.request.leg_commands import ChoiceIdentity
from pdmesh.services.gateway.request.observer import CallReport, Observer
from pdmesh.services.gateway.request.pacer import PacedWaiter, Pacer
from pdmesh.services.gateway.request.spec import (
    UNBOUNDED,
    CallSpec,
    PreparedCall,
    ServedModel,
)
from pdmesh.services.gateway.routing.pooling_fleet import PoolingModel
from pdmesh.services.gateway.routing.scenarios import Asked, ScenarioChooser
from pdmesh.services.gateway.routing.session_hints import ServedChoice
from pdmesh.services.gateway.text.choice_text import TextDelta
from pdmesh.services.gateway.text.prompt import Prompt
from pdmesh.telemetry import metrics, names, traces
from pdmesh.v1.scheduler_service_pb2 import HandedPlan, PlanResult

_scenarios = metrics.counter(
    names.SCENARIO_CHOSEN,
    "Calls by what chose their scenario: a label, a rule, the model, or the default",
)
_ttft_slo = metrics.counter(names.TTFT_SLO, "Calls by scenario and TTFT objective: met, missed")
_BY_LABEL: Final = MappingProxyType(
    {"by": "label"}
)  # the scenario is left out, because clients may send any text as the label
_BY_DEFAULT: Final = MappingProxyType({"by": "default"})
_MAX_TAKEN: Final = (
    16_384  # one `take` turns this many tokens into text, which takes some milliseconds
)


class Call(PacedWaiter):
    """A client's call and its choices. One task may wait for their output."""

    def __init__(
        self,
        request_id: str,
        spec: CallSpec,
        span: Span,
        pacer: Pacer,
        permit: Permit = ANYONES_PERMIT,
    ) -> None:
        super().__init__(pacer)
        self.request_id = request_id
        self.spec = spec
        self.span = span
        self.permit = permit
        self.num_prompt_tokens = sum(map(len, spec.prompts))
        self.created = int(time.time())  # only shown to clients
        self.started_at = time.monotonic()
        self.generations: list[Generation] = []
        self.is_void = False  # the client got an error and no output
        self.num_reasoning_tokens = 0  # sum over the choices that have ended

    def take(self) -> list[TextDelta]:
        """The new output of each choice.

        Once the output exceeds `_MAX_TAKEN` tokens, the remaining choices wait until the next
        iteration of the event loop. `changed` then returns again.
        """
        taken: list[TextDelta] = []
        num_tokens = 0
        for generation in self.generations:
            delta = generation.take()
            if delta is not None:
                taken.append(delta)
                num_tokens += len(delta.token_ids)
                if num_tokens > _MAX_TAKEN:
                    asyncio.get_running_loop().call_soon(self.on_news)
                    break
        return taken

    @property
    def num_completion_tokens(self) -> int:
        return sum([g.num_completion_tokens for g in self.generations])

    @property
    def num_used_tokens(self) -> int:
        """The number of tokens to charge to the call's tenant."""
        choices = [
            ChoiceUse(
                g.num_completion_tokens, g.num_taken_tokens, bool(g.timings.accepted), g.is_failed
            )
            for g in self.generations
        ]
        return tokens_of_answers(self.num_prompt_tokens, choices, is_void=self.is_void)

    @property
    def num_cached_tokens(self) -> int:
        """The number of cached prompt tokens. Each prompt counts once, for its first choice."""
        return sum([g.core.num_cached_tokens for g in self.generations[:: self.spec.n]])

    def cancel(self, error: MeshError | None = None) -> None:
        for generation in self.generations:
            generation.cancel(error)


class Endable(Protocol):
    """An open call of any kind."""

    def cancel(self, error: MeshError | None = None) -> None: ...


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


class Frontend:
    """Opens and closes calls. At most `max_calls` are open at once. `drain` ends the open calls."""

    def __init__(
        self,
        shared: Collaborators,
        observer: Observer,
        *,
        default_max_tokens: int,
        max_calls: int,
        chunk_interval_s: float = 0.0,
        scenarios: ScenarioChooser,
    ) -> None:
        self.shared = shared
        self._scenarios = scenarios
        self.is_draining = False
        self.observer = observer
        self._default_max_tokens = default_max_tokens
        self._max_calls = max_calls
        self._pacer = Pacer(chunk_interval_s)
        self._calls: dict[Endable, None] = {}
        self._is_idle = asyncio.Event()

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def model_name(self, asked: str, scenario: str = "") -> str:
        return self.shared.fleet.model_name(asked, scenario)

    async def served_model(self, asked: str, tenant: Tenant, scenario: str = "") -> ServedModel:
        """The model that a request of this tenant names.

        `scenario` is empty if the request names no scenario. Raises MeshError.
        """
        fleet = self.shared.fleet
        name = fleet.model_name(asked, scenario)
        check_model(tenant, name)
        context_length, adapter = self._context_length(name), fleet.adapted(name)
        base = name if adapter is None else adapter.model
        tokenizer = await self.shared.tokenizers.get(
            base, fleet.text_of(base), lambda: fleet.text_sources(base)
        )
        return ServedModel(name, tokenizer, context_length, adapter)

    async def pooling_model(
        self,
        asked: str,
        tenant: Tenant,
        scenario: str = "",
        fits: Callable[[PoolingFacts], bool] = bool,
    ) -> tuple[PoolingModel, ServedModel]:
        """The pooling model that a request of this tenant names, and its tokenizer.

        `fits` is explained in `PoolingFleet.model`. Raises MeshError.
        """
        fleet = self.shared.fleet.pooling
        model = fleet.model(asked, scenario, fits)
        check_model(tenant, model.name)
        tokenizer = await self.shared.tokenizers.get(
            model.name,
            fleet.served.text_of(model.name),
            lambda: fleet.served.text_sources(model.name),
        )
        return model, ServedModel(model.name, tokenizer, model.max_model_len)

    async def any_model(self, asked: str, tenant: Tenant) -> ServedModel:
        """The generating or pooling model that a request names, for its tokenizer.

        Raises MeshError.
        """
        if self.shared.fleet.is_pooling_model(asked):
            return (await self.pooling_model(asked, tenant))[1]
        return await self.served_model(asked, tenant)

    def check_open(self) -> None:
        """Raises Draining or Overloaded, before the gateway reads and encodes a prompt (S97)."""
        if self.is_draining:
            raise Draining("this gateway is shutting down")
        if len(self._calls) >= self._max_calls:
            raise Overloaded("this gateway has too many open requests")

    def open(
        self,
        prepared: PreparedCall,
        request_id: str,
        permit: Permit,
        traceparent: str = "",
        *,
        is_quiet: bool = False,
        handed: HandedPlan | None = None,
    ) -> Call:
        """Start a call. The caller must close it.

        If `is_quiet` is true, `Call.changed` returns when a choice ends, but not for each token.
        `handed` is the endpoint picker's plan for this call, if any. Raises Draining, Overloaded or
        RateLimited.
        """
        self.check_open()
        _count_scenario(prepared)
        spec, prompts, budgets = prepared.spec, prepared.prompts, prepared.max_tokens
        permit.charge(sum(map(len, spec.prompts)) + spec.n * sum(budgets))
        span = self.observer.start_span(spec, traceparent)
        call = Call(request_id, spec, span, self._pacer, permit)
        on_tokens: Callable[[], None] = unheard if is_quiet else call.on_tokens
        for prompt_index, prompt in enumerate(prompts):
            for choice in range(spec.n):
                index = prompt_index * spec.n + choice
                identity = self._identity(call, index, choice, budgets[prompt_index])
                if handed is not None and index == 0:
                    identity.handed = self._fitting(handed, prepared)
                generation = Generation(
                    self.shared, spec, prompt, identity, on_tokens, call.on_news
                )
                call.generations.append(generation)
        self._calls[call] = None  # from here on the call must be closed
        self.observer.on_accepted()
        for generation in call.generations:
            generation.start()
        return call

    async def prepare(self, spec: CallSpec) -> PreparedCall:
        """Determine everything that the master needs to choose instances for the call.

        Raises InvalidRequest, ModelNotFound, NoInstance or PoisonRequest.
        """
        num_choices = spec.n * len(spec.prompts)
        check_grammars(spec.sampling.constraint, num_choices)
        check_allowed_ids(len(spec.sampling.shaping.allowed_token_ids), num_choices)
        spec = self._with_adapter(spec)
        budgets = tuple(self._max_tokens(spec, len(p)) for p in spec.prompts)
        digest = spec.adapter.adapter.digest if spec.adapter is not None else ""
        prompts = tuple(
            Prompt(
                tokens,
                self.shared.hash_secret,
                spec.tenant.name,
                spec.cache_salt,
                digest,
                spec.images,
            )
            for tokens in spec.prompts
        )
        if self.shared.poison:
            self._refuse_poison(prompts)
        await self._name_blocks(spec, prompts)
        spec, by = await self._with_scenario(spec, prompts)
        return PreparedCall(spec, prompts, budgets, by)

    def take_handed(self, header: str) -> HandedPlan | None:
        """The endpoint picker's plan in a request header. None if the header has no valid plan."""
        handed = self.shared.handed_plans
        return None if handed is None else handed.take(header)

    def _fitting(self, handed: HandedPlan, prepared: PreparedCall) -> PlanResult | None:
        plans = self.shared.handed_plans
        assert plans is not None
        return handed.result if plans.fits(handed, handed_for(prepared)) else None

    def _with_adapter(self, spec: CallSpec) -> CallSpec:
        """Bind the call to the content that its adapter (LoRA) has now.

        The name may have changed its meaning since the prompt was encoded. Raises ModelNotFound if
        the adapter was removed, and NoInstance if the name now stands for an adapter of another
        model, or for a model itself.
        """
        if spec.adapter is None:
            return spec
        found = self.shared.fleet.adapted(self.model_name(spec.model, spec.scenario))
        if found is None or found.model != spec.adapter.model:
            raise NoInstance(f"{spec.model} has become another model during this request")
        return replace(spec, adapter=found)

    async def _name_blocks(self, spec: CallSpec, prompts: Sequence[Prompt]) -> None:
        """Hash the prompts' blocks in steps, so that the event loop can work in between."""
        record = self.shared.fleet.reference(spec.base_model)
        if record is not None:
            for prompt in prompts:
                for _ in prompt.hashing(record, self.shared.kept_hashes):
                    await asyncio.sleep(0)

    async def _with_scenario(
        self, spec: CallSpec, prompts: Sequence[Prompt]
    ) -> tuple[CallSpec, str]:
        """Return the call with its scenario, and whether a label, a rule or the model chose it.

        If a call has several prompts, the rules see the longest one.
        """
        if spec.scenario:
            return spec, "label"
        longest = max(prompts, key=lambda prompt: len(prompt.tokens))
        found, by = await self._scenarios.choose(
            Asked(spec.operation, spec.base_model, len(longest.tokens), longest.hashes)
        )
        if found == DEFAULT_SCENARIO and by == "model":
            return spec, by
        return replace(spec, scenario=found), by

    def take_in(self, call: Endable) -> None:
        """Register a pooling call that begins, so that `drain` ends it."""
        self._calls[call] = None
        self.observer.on_accepted()

    def let_go(self, call: Endable) -> None:
        """Forget a pooling call that has ended. Idempotent."""
        if self._calls.pop(call, _ABSENT) is not _ABSENT and not self._calls:
            self._is_idle.set()

    def close(self, call: Call, error: MeshError | None = None) -> None:
        """Cancel the choices that still run, and report the call. Idempotent.

        `error` is the error that the API reported to the client, if any.
        """
        if self._calls.pop(call, _ABSENT) is _ABSENT:
            return
        if not self._calls:
            self._is_idle.set()
        call.cancel(error)
        call.permit.settle(call.num_used_tokens)
        self._judge(call)
        self._tell_session(call)
        self.observer.on_closed(_report(call))
        for generation in call.generations:
            generation.detach()

    def _refuse_poison(self, prompts: Sequence[Prompt]) -> None:
        now = time.monotonic()
        if any(self.shared.poison.is_poison(p.digest, now) for p in prompts):
            raise PoisonRequest("instances died recently while they worked on this prompt")

    def _judge(self, call: Call) -> None:
        """Record prompts that killed instances, and whether the call met its TTFT objective.

        The record of a prompt is cleared if one of its choices was completed.
        """
        poison = self.shared.poison
        for generation in call.generations:
            if victims := generation.core.deaths_witnessed:
                poison.add(generation.prompt.digest, victims, time.monotonic())
        if poison:
            for generation in call.generations:
                if isinstance(generation.core.outcome, Complete):
                    poison.clear(generation.prompt.digest)
        _count_slo(call, self.shared.slos)

    def _tell_session(self, call: Call) -> None:
        """Report the client's session state to the instances, even after a failed call."""
        if (session := call.spec.session) is None:
            return
        served = [
            ServedChoice(g.prompt, g.core.emitted, (g.core.prefill_id, g.core.decode_id))
            for g in call.generations
            if _ended(g).is_answered
        ]
        prompt = call.generations[0].prompt
        self.shared.session_hints.ended(session.id, session.state, prompt, served)

    async def drain(self, drain_s: float) -> None:
        """Admit no more calls. Calls that are still open after `drain_s` end with an error."""
        self.is_draining = True
        self._is_idle.clear()
        if self._calls:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_idle.wait(), drain_s)
        for call in list(self._calls):
            call.cancel(Draining("this gateway is shutting down"))

    def _identity(self, call: Call, index: int, choice: int, max_tokens: int) -> ChoiceIdentity:
        seed = call.spec.sampling.seed
        return ChoiceIdentity(
            request_id=call.request_id if index == 0 else f"{call.request_id}-{index}",
            index=index,
            traceparent=traces.traceparent(call.span),
            seed=None if seed is None else seed + choice,
            max_tokens=max_tokens,
        )

    def _context_length(self, model: str) -> int:
        """The most tokens that prompt and answer may have together. Raises NoInstance."""
        record = self.shared.fleet.reference(model)
        if record is None:
            raise NoInstance(f"no instance serves {model} now")
        return record.max_model_len or UNBOUNDED

    def _max_tokens(self, spec: CallSpec, num_prompt_tokens: int) -> int:
        """The most tokens that an answer to this prompt may have."""
        context = spec.context_length
        if not num_prompt_tokens:
            raise InvalidRequest("the prompt is empty", field=spec.field_of_prompt)
        room = context - num_prompt_tokens
        asked = spec.sampling.max_tokens
        if room < 1:
            raise context_exceeded(f"{num_prompt_tokens} tokens", context, spec.field_of_prompt)
        default = spec.sampling.default_max_tokens or self._default_max_tokens
        found = max_answer_tokens(asked, default, room)
        if found is None:
            field = spec.field_of_max_tokens
            message = f"{field} is {asked}, but the context leaves {room} after this prompt"
            raise InvalidRequest(message, reason="CONTEXT_LENGTH_EXCEEDED", field=field)
        return found


def handed_for(prepared: PreparedCall) -> HandedPlan:
    """The request fields that must be the same in an endpoint picker's plan for this call."""
    spec = prepared.spec
    return HandedPlan(
        prompt_digest=prepared.prompts[0].digest,
        model=spec.base_model,
        adapter_digest=spec.adapter.adapter.digest if spec.adapter is not None else "",
        scenario=spec.scenario,
        max_tokens=prepared.max_tokens[0],
    )


def _count_scenario(prepared: PreparedCall) -> None:
    scenario, by = prepared.spec.scenario, prepared.scenario_by
    if by == "label":
        _scenarios.add(1, _BY_LABEL)
    elif not scenario:
        _scenarios.add(1, _BY_DEFAULT)
    else:
        _scenarios.add(1, {names.ATTR_SCENARIO: scenario, "by": by})


def _count_slo(call: Call, slos: Slos) -> None:
    """Count whether the first token came in time (S9)."""
    first = call.generations[0]
    at = first.timings.first_token
    limit_s = slos.limits_for(call.spec.scenario, len(first.prompt.tokens)).ttft_s
    has_failed = isinstance(first.core.outcome, Fail)
    is_met = is_ttft_met(at - call.started_at if at else None, limit_s, has_failed=has_failed)
    if is_met is not None:
        labels = {
            names.ATTR_SCENARIO: slos.label(call.spec.scenario),
            names.ATTR_OUTCOME: "met" if is_met else "missed",
        }
        _ttft_slo.add(1, labels)


_ABSENT: Final = object()


def _ended(generation: Generation) -> EndedChoice:
    return EndedChoice(generation.core.outcome, generation.is_stopped, generation.error)


def _report(call: Call) -> CallReport:
    outcome, reason = call_outcome([_ended(g) for g in call.generations])
    return CallReport(
        request_id=call.request_id,
        spec=call.spec,
        span=call.span,
        outcome=outcome,
        reason=reason,
        started_at=call.started_at,
        timings=[g.timings for g in call.generations],
        cores=[g.core for g in call.generations],
        num_prompt_tokens=call.num_prompt_tokens,
        num_completion_tokens=call.num_completion_tokens,
        num_cached_tokens=call.num_cached_tokens,
    )
