"""The settings that a gateway reads from its environment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from pdmesh.config import JsonObject, ServerUrl, settings_config, shared
from pdmesh.core.access.exposure import lacks_secret
from pdmesh.core.deadlines import ANSWER_S, LEG_STALL_S
from pdmesh.core.images.image_bounds import MAX_PIXELS, ImageRules
from pdmesh.core.kv.tiers.session_holds import MAX_HOLD_S
from pdmesh.core.request import retry_budget
from pdmesh.core.request.events import RequestLimits
from pdmesh.core.request.scenario_rules import ScenarioRule
from pdmesh.core.request.slo import ScenarioSlo, Slos
from pdmesh.net.oidc.settings import OidcSettings
from pdmesh.services.gateway.text.tokenizer_pool import TokenizerRules
from pdmesh.v1.instance_service_pb2 import KV_TRANSFER_PER_LAYER, KV_TRANSFER_WHOLE, KvTransfer

TransferMode = Literal["whole", "per_layer"]
DEFAULT_SECRET: Final = "pdmesh-development"  # noqa: S105 - known to all, for development
_MODES: Final = {"whole": KV_TRANSFER_WHOLE, "per_layer": KV_TRANSFER_PER_LAYER}


_IMAGE_HOST: Final = re.compile(
    r"[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?(:[0-9]{1,5})?", re.IGNORECASE
)


def _image_host(host: str) -> str:
    if not _IMAGE_HOST.fullmatch(host):
        raise ValueError("a host must have the form example.org or example.org:8443")
    return host


_ImageHost = Annotated[str, AfterValidator(_image_host)]


class ScenarioSettings(JsonObject):
    """What a scenario's clients may expect."""

    ttft_s: float = Field(10.0, gt=0)
    ttft_s_per_1k_tokens: float = Field(0.0, ge=0)
    default_text: str | None = Field(None, max_length=4096)


class ScenarioRuleSettings(JsonObject):
    """A scenario for requests that name none."""

    scenario: str = Field(min_length=1, max_length=256)
    min_prompt_tokens: int = Field(0, ge=0)
    max_prompt_tokens: int = Field(0, ge=0)
    max_uncached_tokens: int = Field(0, ge=0)
    operation: Literal["", "chat", "text_completion"] = ""

    @field_validator("max_prompt_tokens")
    @classmethod
    def _is_no_empty_range(cls, value: int, info: ValidationInfo) -> int:
        if 0 < value < info.data.get("min_prompt_tokens", 0):
            raise PydanticCustomError("range", "must be 0 or at least min_prompt_tokens")
        return value

    @field_validator("max_uncached_tokens")
    @classmethod
    def _is_a_bound(cls, value: int, info: ValidationInfo) -> int:
        if 0 < info.data.get("max_prompt_tokens", 0) <= value:
            raise PydanticCustomError(
                "range", "must be less than max_prompt_tokens, or it bounds nothing"
            )
        return value


class Settings(OidcSettings):
    model_config = settings_config("PDMESH_GATEWAY_")

    host: str = shared("127.0.0.1", description="Address of the ports for clients, HTTP and gRPC")
    grpc_port: int = Field(
        8001, ge=0, le=65535, description="gRPC port for clients; 0 picks a free one"
    )
    http_port: int = Field(
        8000, ge=0, le=65535, description="HTTP port for clients; 0 picks a free one"
    )
    picker_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="gRPC port of the endpoint picker for Envoy's ext_proc filter, at inner_host; "
        "0 picks a free one; none: no picker, and no plans in headers (docs/endpoint-picker.md)",
    )
    picker_callers: Literal["certified", "any"] = Field(
        "certified",
        description="Who may call the picker with tls_dir: proxies with a certificate of the role "
        "proxy, or any caller over TLS, for proxies that cannot show a certificate",
    )
    region: str = shared("", description="Region of this gateway; instances in it are preferred")
    reuse_port: bool = Field(
        False, description="Share the ports for clients and the picker's with other gateways"
    )
    model_dir: Path = shared(
        Path(".pdmesh/model"),
        description="Folder of a model; a gateway needs it only for instances that have none, and "
        "gets the tokenizers of other models from their instances",
    )
    model: str = Field(
        "",
        description="The model that the name `default` refers to; empty: the scenario's model",
    )
    hash_secret: SecretStr = shared(
        SecretStr(DEFAULT_SECRET),
        description="Key of the block hashes, equal on all services",
    )
    keys_file: Path | None = Field(
        None,
        description="File of API keys and tenants (pdmesh keys); none: all callers are admitted",
    )
    allow_anonymous: bool = Field(
        False, description="Listen without API keys on an address that is not this machine's own"
    )
    default_max_tokens: int = Field(
        1024, ge=1, description="Token limit of a chat without max_tokens"
    )
    strict_fields: bool = Field(
        False,
        description="Refuse requests with unknown fields; otherwise these fields are ignored, and "
        "the response header x-pdmesh-ignored names them",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto: the model's generation_config.json gives the sampling defaults; none: "
        "it is ignored",
    )
    max_calls: int = Field(
        4096, ge=1, description="Most open requests; further ones get 429 at once"
    )
    max_waiting: int = Field(
        1024, ge=0, description="Most requests that wait for a slot; further ones get 429"
    )
    tool_parser: str = Field(
        "auto",
        description="vLLM's parser of tool calls, by its name (hermes, llama3_json, ...); auto: by "
        "the model's chat template; none: tools get a 400",
    )
    reasoning_parser: str = Field(
        "auto",
        description="vLLM's parser of reasoning, by its name (qwen3, deepseek_r1, ...); auto: by "
        "the model's chat template; none: reasoning is text",
    )
    parsers_for_tools: bool = Field(
        False,
        description="start the parsers with the gateway also for models that need them for tool "
        "calls only; else the first such call waits some seconds. Models with a reasoning parser "
        "have them started in any case",
    )
    redis_url: ServerUrl = shared(
        "redis://127.0.0.1:6379",
        description="Redis or Valkey server that keeps responses (/v1/responses with store)",
    )
    responses_ttl_s: float = Field(
        86_400.0, ge=1, description="How long a response is kept for previous_response_id"
    )
    responses_max_count: int = Field(
        4096, ge=0, description="Most responses kept for a tenant, the oldest go; 0: none are kept"
    )
    responses_max_bytes: int = Field(
        64 << 20, ge=65536, description="Most bytes of responses kept for a tenant"
    )
    responses_max_total_bytes: int = Field(
        128 << 20,
        ge=65536,
        description="Most bytes of responses kept for all tenants, the oldest go; leave the index "
        "room below Redis's maxmemory",
    )
    prefill_batch: int = Field(
        0,
        ge=0,
        description="Number of prompts that a prefill computes in lockstep (DP size), so that "
        "waiting requests are sent in batches of similar length; 0: one by one",
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, description="Largest HTTP body or gRPC message")
    max_incoming_bytes: int = Field(
        256 << 20,
        ge=65536,
        description="Most bytes of HTTP bodies being read at once; further bodies get 429",
    )
    max_images: int = Field(8, ge=0, le=64, description="Most images in a request; 0: none")
    max_image_bytes: int = Field(
        8 << 20,
        ge=1024,
        le=16 << 20,
        description="Most bytes of the images of a request; those in its body are within "
        "max_body_bytes too",
    )
    max_image_pixels: int = Field(
        16 << 20, ge=1024, le=MAX_PIXELS, description="Most pixels of an image"
    )
    max_held_image_bytes: int = Field(
        256 << 20,
        ge=1024,
        description="Most bytes of the images of all open requests; further requests get 429",
    )
    image_hosts: list[_ImageHost] = Field(
        [],
        description="Hosts that image_url may name, as JSON: example.org or example.org:8443; with "
        "none, images come in the request only",
    )
    image_fetch_timeout_s: float = Field(
        5.0, gt=0, le=60, description="Longest time to fetch all images of a request"
    )
    ttft_s: float = Field(
        10.0, gt=0, description="Longest wait for a slot; then the request gets 429"
    )
    ttft_s_per_1k_tokens: float = Field(
        0.0, ge=0, description="Added to ttft_s for each 1,000 prompt tokens"
    )
    scenarios: dict[str, ScenarioSettings] = Field(
        {},
        description="Settings of each scenario, as JSON: ttft_s, ttft_s_per_1k_tokens, "
        "default_text (instead of a 429 or 503); a scenario's slo in the desired state wins",
    )
    scenario_rules: list[ScenarioRuleSettings] = Field(
        [],
        description="Rules for requests without a scenario, as JSON; the first match wins: "
        "scenario, min_prompt_tokens, max_prompt_tokens, max_uncached_tokens (the most "
        "prompt tokens that no instance of the scenario holds), operation",
    )
    session_hold_s: float = Field(
        120.0,
        ge=0,
        le=MAX_HOLD_S,
        description="How long host pools evict a session's blocks last after it paused for a tool "
        "(at most a quarter of a pool, and a quarter of that for one tenant)",
    )
    deadline_s: float = Field(600.0, gt=0, description="Longest life of a request")
    answer_s: float = Field(
        ANSWER_S, gt=0, description="Longest time for an instance to accept or reject"
    )
    stall_s: float = Field(
        LEG_STALL_S,
        gt=0,
        description="Longest silence of an accepted request: no token, and none of the signs of "
        "work that its engine sends twice a second",
    )
    retry_s: float = Field(
        0.25, gt=0, description="First interval between attempts while a request waits"
    )
    max_migrations: int = Field(3, ge=0, description="Most migrations of a request")
    max_candidates: int = Field(8, ge=1, description="Most instances asked before a request waits")
    retry_ratio: float = Field(
        retry_budget.RATIO, ge=0, description="Retries that each request adds to the retry budget"
    )
    retry_reserve: float = Field(
        retry_budget.RESERVE, ge=0, description="Most retries in the retry budget"
    )
    kv_transfer: TransferMode = shared(
        "whole",
        description="KV goes to decode after prefill (whole), or each layer as it is computed "
        "(per_layer)",
    )
    give_answer_kv: bool = shared(
        True,
        description="After a chat's answer, prefill fetches its KV from decode's host pool if "
        "that saves time; needs KV_PEER_POOLS",
    )
    kv_transfer_by_scenario: dict[str, TransferMode] = shared(
        {}, description='Scenarios with a different kv_transfer, as JSON: {"long": "per_layer"}'
    )
    plan_timeout_s: float = Field(0.25, gt=0, description="Longest wait for a plan from the master")
    max_staleness_s: float = Field(
        30.0, gt=0, description="Without a master, use a registry view no older than this"
    )
    chunk_interval_ms: float = Field(
        2.0,
        ge=0,
        description="Shortest interval between writes to a stream, except its first and last token",
    )
    write_timeout_s: float = Field(
        30.0, gt=0, description="Disconnect a client that reads nothing for this long"
    )
    receive_timeout_s: float = Field(
        20.0, gt=0, description="Longest time for a request to arrive completely"
    )
    max_header_bytes: int = Field(16384, ge=1024, description="Largest HTTP request head")
    max_connections: int = Field(8192, ge=1, description="Most open connections on each port")
    max_connections_per_ip: int = Field(
        1024,
        ge=1,
        description="Most open HTTP connections from one address; raise it behind a proxy",
    )
    drain_s: float = Field(10.0, ge=0, description="Time for streams to finish at shutdown")
    tokenizer_threads: int = Field(
        1, ge=1, description="Threads that tokenize texts of 2,049 to 65,536 characters"
    )
    tokenizer_long_threads: int = Field(
        0,
        ge=0,
        description="Threads that tokenize longer texts, one each; 0: two fewer than processors, "
        "at least 1",
    )
    tokenizer_cache_bytes: int = Field(
        512 << 20,
        ge=1,
        description="Memory for tokenizers; those of the models least recently asked for leave",
    )
    section_cache_bytes: int = Field(
        64 << 20,
        ge=0,
        description="Memory for the tokens of long chats, whose next turn reuses them; 0: none",
    )

    def kv_transfer_of(self, scenario: str) -> KvTransfer.ValueType:
        """How the gateway asks prefills that serve `scenario` to hand KV on (S51)."""
        return _MODES[self.kv_transfer_by_scenario.get(scenario, self.kv_transfer)]

    @property
    def why_no_picker(self) -> str:
        """Why no endpoint picker may start, or empty if one may start.

        The picker signs plans with the secret.
        """
        is_own = self.hash_secret.get_secret_value() != DEFAULT_SECRET
        if not lacks_secret(self.host, has_own_secret=is_own):
            return ""
        return (
            "PDMESH_GATEWAY_PICKER_PORT needs a PDMESH_HASH_SECRET of your own: with the default, "
            f"whoever reaches {self.host} could sign plans"
        )

    @property
    def image_rules(self) -> ImageRules:
        hosts = frozenset(host.lower() for host in self.image_hosts)
        return ImageRules(self.max_image_bytes, self.max_image_pixels, hosts)

    @property
    def tokenizer_rules(self) -> TokenizerRules:
        return TokenizerRules(
            max_chars=self.max_body_bytes,
            has_defaults=self.generation_config == "auto",
            num_threads=self.tokenizer_threads,
            num_long_threads=self.tokenizer_long_threads,
            max_bytes=self.tokenizer_cache_bytes,
            max_section_bytes=self.section_cache_bytes,
        )

    @property
    def rules(self) -> tuple[ScenarioRule, ...]:
        return tuple(ScenarioRule(**rule.model_dump()) for rule in self.scenario_rules)

    @property
    def limits(self) -> RequestLimits:
        return RequestLimits(
            deadline_s=self.deadline_s,
            ttft_s=self.ttft_s,
            answer_s=self.answer_s,
            stall_s=self.stall_s,
            retry_s=self.retry_s,
            max_migrations=self.max_migrations,
            max_candidates=self.max_candidates,
        )

    @property
    def slos(self) -> Slos:
        scenarios = {
            name: ScenarioSlo(s.ttft_s, s.ttft_s_per_1k_tokens, s.default_text)
            for name, s in self.scenarios.items()
        }
        return Slos(self.limits, self.ttft_s_per_1k_tokens, scenarios)
