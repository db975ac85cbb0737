"""The names of all metrics, spans and attributes, which docs/telemetry.md lists.

OpenTelemetry's names come first, as in the semantic conventions 0.66. There, `gen_ai` is still in
development. Our own names begin with `pdmesh.`. A metric's label has a bounded set of values, for
example models, reasons or outcomes. Request ids belong in traces and logs.
"""

from __future__ import annotations

from typing import Final

# OpenTelemetry's attributes.
ATTR_OPERATION: Final = "gen_ai.operation.name"  # chat, text_completion
ATTR_PROVIDER: Final = "gen_ai.provider.name"  # always pdmesh
ATTR_REQUEST_MODEL: Final = "gen_ai.request.model"  # the served model, as its clients name it
ATTR_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"  # of the prompt
ATTR_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"  # of all choices
ATTR_ERROR_TYPE: Final = "error.type"  # the reason, if the call failed

# Our attributes.
ATTR_REQUEST_ID: Final = "pdmesh.request.id"  # made by the gateway; also the header x-request-id
ATTR_ATTEMPT: Final = "pdmesh.request.attempt"  # counts plans; above 1 after a lost leg
ATTR_GROUP_ID: Final = "pdmesh.group.id"  # the group that the plan names
ATTR_REASON: Final = "pdmesh.reason"  # stable, as in errors and google.rpc.ErrorInfo
ATTR_OUTCOME: Final = "pdmesh.outcome"  # completed, failed, cancelled; some metrics have others
ATTR_TIER: Final = "tier"  # host, peer, file
# served, prefetched, stored, lent, evicted, corrupt, failed, late, dropped
ATTR_EVENT: Final = "event"
# Of the time from blank to ready: fetch, verify, build, connect; of a step: schedule, compute,
# process, gap.
ATTR_PART: Final = "part"
ATTR_STEP: Final = "step"  # assigned, loaded, ...: see docs/events.md
ATTR_SCENARIO: Final = "pdmesh.scenario"  # a configured scenario, or default
ATTR_TENANT: Final = "pdmesh.tenant"  # as in the key file; empty: unknown
# prompt tokens that prefill did not compute
ATTR_CACHED_TOKENS: Final = "pdmesh.usage.cached_tokens"
# queries from one gateway that were planned together
ATTR_PLAN_QUERIES: Final = "pdmesh.plan.queries"
ATTR_PLAN_HOLDERS: Final = "pdmesh.plan.holders"  # instances that hold the beginning of the prompt
# the prompt tokens that the best prefill holds
ATTR_MATCHED_TOKENS: Final = "pdmesh.plan.matched_tokens"
ATTR_PREFILL_ID: Final = "pdmesh.prefill.id"  # the best prefill of a plan

# The spans of one request, outermost first.
SPAN_CALL: Final = "{operation} {model}"  # the whole call, at the gateway (SERVER)
SPAN_PLAN: Final = "plan"  # the wait at the gateway (CLIENT); the work at the master (SERVER)
SPAN_PLAN_HASH: Final = "plan.hash"  # the names of the prompt's blocks, computed at the gateway
SPAN_PLAN_MATCH: Final = "plan.match"  # the look-up of the blocks' holders, at the master
# the choice of instances (filter, score, pick), at the master
SPAN_PLAN_DECIDE: Final = "plan.decide"
SPAN_PREFILL: Final = "prefill"  # from acceptance to the first token, at the prefill (SERVER)
SPAN_KV_TRANSFER: Final = "kv.transfer"  # from Start until the KV is usable, at the decode (CLIENT)
SPAN_ENCODE: Final = "encode"  # of the images of one prompt, at the encoder (SERVER)
SPAN_POOLING: Final = "pooling"  # of one batch of inputs, at the pooling instance (SERVER)
SPAN_DECODE: Final = "decode"  # from Start to the last token, at the decode (SERVER)

PROVIDER: Final = "pdmesh"

# OpenTelemetry's metrics, in seconds.
REQUEST_DURATION: Final = "gen_ai.server.request.duration"
TIME_TO_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
TIME_PER_OUTPUT_TOKEN: Final = "gen_ai.server.time_per_output_token"

# Metrics of every process.
LOOP_LAG: Final = "pdmesh.process.loop_lag"
LOOP_HELD: Final = "pdmesh.process.loop_held"
GC_PAUSE: Final = "pdmesh.process.gc.pause"
READY: Final = "pdmesh.process.ready"
CERTIFICATE_LEFT: Final = "pdmesh.process.certificate_left"

# Metrics of the gateway.
REQUESTS: Final = "pdmesh.requests"
REQUESTS_IN_FLIGHT: Final = "pdmesh.requests.in_flight"
REQUEST_REJECTIONS: Final = "pdmesh.request.rejections"
REQUEST_MIGRATIONS: Final = "pdmesh.request.migrations"
WAITING_REQUESTS: Final = "pdmesh.gateway.waiting"
WAIT_DURATION: Final = "pdmesh.gateway.wait.duration"
WAITING_EVICTED: Final = "pdmesh.gateway.waiting.evicted"
WAITING_REFUSED: Final = "pdmesh.gateway.waiting.refused"
REFUSED_UNASKED: Final = "pdmesh.gateway.refused_unasked"
SESSION_HINTS: Final = "pdmesh.session.hints"
SCENARIO_CHOSEN: Final = "pdmesh.scenario.chosen"
TTFT_SLO: Final = "pdmesh.slo.ttft"
GATEWAY_POISON: Final = "pdmesh.gateway.poison"
REQUESTS_ACCEPTED: Final = "pdmesh.requests.accepted"
GATEWAY_TOKENS: Final = "pdmesh.gateway.tokens"
GATEWAY_CACHED_TOKENS: Final = "pdmesh.gateway.tokens.cached"
GATEWAY_SESSIONS: Final = "pdmesh.gateway.sessions"
GATEWAY_LEGS: Final = "pdmesh.gateway.legs"
GATEWAY_PLANS: Final = "pdmesh.gateway.plans"
GATEWAY_HANDED_IGNORED: Final = "pdmesh.gateway.handed_plans.ignored"
PICKER_PICKS: Final = "pdmesh.picker.picks"
PICKER_REFUSED: Final = "pdmesh.picker.refused"
PICKER_DURATION: Final = "pdmesh.picker.duration"
PICKER_STREAMS: Final = "pdmesh.picker.streams"
GATEWAY_CONNECTIONS: Final = "pdmesh.gateway.connections"
GATEWAY_CONNECTIONS_REFUSED: Final = "pdmesh.gateway.connections.refused"
GATEWAY_ENCODING: Final = "pdmesh.gateway.encoding"
GATEWAY_TOKENIZERS: Final = "pdmesh.gateway.tokenizers"
GATEWAY_TOKENIZER_BYTES: Final = "pdmesh.gateway.tokenizers.used"
GATEWAY_TOKENIZERS_EVICTED: Final = "pdmesh.gateway.tokenizers.evicted"
GATEWAY_TOKENIZER_LOADS: Final = "pdmesh.gateway.tokenizers.loads"
GATEWAY_SECTION_BYTES: Final = "pdmesh.gateway.sections.used"
GATEWAY_SECTIONS_EVICTED: Final = "pdmesh.gateway.sections.evicted"
GATEWAY_SECTION_TOKENS_REUSED: Final = "pdmesh.gateway.sections.tokens.reused"
GATEWAY_SECTION_TOKENS_ENCODED: Final = "pdmesh.gateway.sections.tokens.encoded"
GATEWAY_PARSER_STARTS: Final = "pdmesh.gateway.parser.starts"
GATEWAY_INCOMING: Final = "pdmesh.gateway.incoming"
GATEWAY_IMAGES_HELD: Final = "pdmesh.gateway.images.held"
GATEWAY_ENCODED_PROMPTS: Final = "pdmesh.gateway.images.encoded_prompts"
GATEWAY_REFUSED: Final = "pdmesh.gateway.refused"
TENANT_TOKENS: Final = "pdmesh.tenant.tokens"
OIDC_KEYS_AGE: Final = "pdmesh.oidc.keys_age"
OIDC_FETCHES: Final = "pdmesh.oidc.fetches"
GATEWAY_RESPONSES_KEPT: Final = "pdmesh.gateway.responses.kept"
GATEWAY_RESPONSES_EVICTED: Final = "pdmesh.gateway.responses.evicted"
GATEWAY_RESPONSES_LOOKUPS: Final = "pdmesh.gateway.responses.lookups"
GATEWAY_EVENTS_DROPPED: Final = "pdmesh.gateway.events.dropped"

# Metrics of instances.
SLOTS: Final = "pdmesh.slots"
SLOTS_USED: Final = "pdmesh.slots.used"
ADMISSIONS: Final = "pdmesh.admissions"
KV_BLOCKS_FREE: Final = "pdmesh.kv.blocks.free"
KV_ENGINE_BLOCKS_FREE: Final = "pdmesh.kv.engine.blocks_free"
KV_ENGINE_USAGE: Final = "pdmesh.kv.engine.usage"
KV_TRANSFER_DURATION: Final = "pdmesh.kv.transfer.duration"
KV_TRANSFER_BYTES: Final = "pdmesh.kv.transfer.bytes"
KV_TRANSFER_FAILURES: Final = "pdmesh.kv.transfer.failures"
KV_SOURCES_EXCLUDED: Final = "pdmesh.kv.sources.excluded"
KV_COMPUTED_TOKENS: Final = "pdmesh.kv.computed_tokens"
KV_CONNECTIONS: Final = "pdmesh.kv.connections"
KV_TICKETS: Final = "pdmesh.kv.tickets"
STAGING_BYTES_USED: Final = "pdmesh.kv.staging.used"
KV_TICKETS_CLOSED: Final = "pdmesh.kv.tickets.closed"
LANDING_BYTES_USED: Final = "pdmesh.kv.landing.used"
RETRIEVALS: Final = "pdmesh.kv.retrievals"
PULLS_QUEUED: Final = "pdmesh.kv.pulls.queued"
KV_TIER_BLOCKS: Final = "pdmesh.kv.tier.blocks"
KV_TIER_SECONDS: Final = "pdmesh.kv.tier.load_seconds"
KV_TIER_BYTES: Final = "pdmesh.kv.tier.used"
KV_TIER_PINNED: Final = "pdmesh.kv.tier.pinned_blocks"
KV_TIER_LEASED: Final = "pdmesh.kv.tier.leased_blocks"
ADAPTERS: Final = "pdmesh.adapters"
PINS: Final = "pdmesh.pins"
KV_TIER_FAULTS: Final = "pdmesh.kv.tier.faults"
LEGS_ENDED: Final = "pdmesh.legs.ended"
INSTANCE_TOKENS: Final = "pdmesh.instance.tokens"
SPECULATION_PROPOSALS: Final = "pdmesh.speculation.proposals"
SPECULATION_TOKENS: Final = "pdmesh.speculation.tokens"
BATCH_SIZE: Final = "pdmesh.instance.batch_size"
ENGINE_STEPS: Final = "pdmesh.engine.steps"
ENGINE_STEPS_STEADY: Final = "pdmesh.engine.steps.steady"
ENGINE_STEPS_OVERLAPPED: Final = "pdmesh.engine.steps.overlapped"
ENGINE_STEP_SECONDS: Final = "pdmesh.engine.step_seconds"
ENGINE_TOKENS_PAST_END: Final = "pdmesh.engine.tokens.past_end"
ADAPTERS_LOADED: Final = "pdmesh.adapters.loaded"
ADAPTER_CHANGES: Final = "pdmesh.adapter.changes"
ADAPTER_LOAD_DURATION: Final = "pdmesh.adapter.load.duration"
SESSIONS: Final = "pdmesh.sessions"
SESSIONS_CUT: Final = "pdmesh.sessions.cut"
UNKNOWN_COMMANDS: Final = "pdmesh.sessions.unknown_commands"
ERRORS_DROPPED: Final = "pdmesh.instance.errors.dropped"
IMAGES_ENCODED: Final = "pdmesh.images.encoded"
IMAGES_AWAITED: Final = "pdmesh.images.awaited"
LOAD_SECONDS: Final = "pdmesh.instance.load_seconds"
PEER_CHECKS: Final = "pdmesh.instance.peer_checks"

# Metrics of bus, registry, index, health-monitor and master.
BUS_DROPPED: Final = "pdmesh.bus.dropped"
BUS_RECONNECTS: Final = "pdmesh.bus.reconnects"
REGISTRY_RECORDS: Final = "pdmesh.registry.records"
INDEX_BLOCKS: Final = "pdmesh.index.blocks"
INDEX_GAPS: Final = "pdmesh.index.gaps"
INDEX_AGE: Final = "pdmesh.index.age"
INDEX_DELTA_DELAY: Final = "pdmesh.index.delta.delay"
INDEX_EVICTED: Final = "pdmesh.index.evicted"
INDEX_SNAPSHOTS: Final = "pdmesh.index.snapshots"
INDEX_STORE_ERRORS: Final = "pdmesh.index.store.errors"
INDEX_STORE_PENDING: Final = "pdmesh.index.store.pending"
INDEX_STORE_UP: Final = "pdmesh.index.store.up"
VIEW_AGE: Final = "pdmesh.registry.view_age"
HEALTH_STATES: Final = "pdmesh.health.instances"
HEALTH_CHANGES: Final = "pdmesh.health.changes"
HEALTH_FAULTS: Final = "pdmesh.health.faults"
CANARY_PROBES: Final = "pdmesh.canary.probes"
NODE_DEVICES: Final = "pdmesh.node.devices"
LEADER: Final = "pdmesh.leader"
LEADER_ELECTIONS: Final = "pdmesh.leader.elections"
GROUP_WANTED: Final = "pdmesh.group.wanted"
GROUP_STATE: Final = "pdmesh.group.state"
GROUP_STEPS: Final = "pdmesh.group.steps"
UPGRADE_STEPS: Final = "pdmesh.upgrade.steps"
GROUP_ROUNDS_SKIPPED: Final = "pdmesh.group.rounds.skipped"
USAGE: Final = "pdmesh.usage.instance_time"
FLEET_INSTANCES: Final = "pdmesh.fleet.instances"
PLAN_DURATION: Final = "pdmesh.plan.duration"
PLANS: Final = "pdmesh.plans"
SCENARIO_QUEUE: Final = "pdmesh.scenario.queue"
SCENARIO_T_P: Final = "pdmesh.scenario.t_p"
SCENARIO_DECODE_QUEUE: Final = "pdmesh.scenario.decode_queue"
SCENARIO_T_D: Final = "pdmesh.scenario.t_d"
SCENARIO_XI: Final = "pdmesh.scenario.xi"
SCENARIO_TPOT: Final = "pdmesh.scenario.tpot"
SCENARIO_HITS: Final = "pdmesh.scenario.hit_share"
SCENARIO_T_P_SHARE: Final = "pdmesh.scenario.t_p_share"
SCENARIO_RATE: Final = "pdmesh.scenario.rate"
SCENARIO_PHI: Final = "pdmesh.scenario.phi"
SCENARIO_INSTANCES: Final = "pdmesh.scenario.instances"
SCENARIO_SLOTS: Final = "pdmesh.scenario.slots"
SCENARIO_WAITING: Final = "pdmesh.scenario.waiting"
PREDICTION_ERROR: Final = "pdmesh.plan.prediction.error"
PREDICTION_OBSERVED: Final = "pdmesh.plan.prediction.observed"
BOOKINGS: Final = "pdmesh.plan.bookings"
LOAD_AGE: Final = "pdmesh.fleet.load_age"
