"""Stages the simulated engine's KV: copies a prompt's blocks to where a decode pulls them (S48).

A ticket is the decode's right to pull a prompt's staged KV, and belongs to one leg, which is a
request's stay on this engine. A prompt that is handed on whole is copied when it is completely
computed. A prompt that is handed on per layer has an open ticket from the start. Each chunk's KV in
a layer is copied as soon as it is computed. With the prompt's last chunk, the layer is complete and
may be pulled.
"""

from __future__ import annotations

from pdmesh import failpoints
from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.engine.base import PrefillJob, Ticket, hands_on
from pdmesh.engine.sim.config import SimConfig
from pdmesh.engine.sim.memory import PagedMemory
from pdmesh.engine.sim.model import shift_of, tokens_of
from pdmesh.engine.sim.prefill_queue import PromptUnderWay
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.transport.memory_access import in_host


class Stager:
    """The open tickets of the engine, until the KV agent closes them."""

    def __init__(self, config: SimConfig, memory: PagedMemory, agent: KvAgent) -> None:
        self._config, self._memory, self._agent = config, memory, agent
        self._legs: dict[str, int] = {}  # ticket id -> leg
        self._writing: set[str] = set()  # per-layer tickets whose last layer is not complete
        self.address = ""

    def __len__(self) -> int:
        return len(self._legs)

    def is_per_layer(self, job: PrefillJob) -> bool:
        return job.is_per_layer and hands_on(job, self._config.params.max_model_len)

    def open(self, job: PrefillJob) -> Ticket:
        """Open a per-layer ticket before any KV is computed. `put` adds the KV."""
        self._legs[job.ticket_id] = job.leg
        self._writing.add(job.ticket_id)
        self._agent.open(
            job.ticket_id,
            job.attempt,
            _staging(job),
            self._layout(job),
            self._config.ticket_lease_s,
        )
        return self._ticket(job)

    def put(self, prompt: PromptUnderWay, layer: int) -> None:
        """Write the current chunk's KV in one layer to the engine's memory, and stage it.

        With the prompt's last chunk, the layer is complete and may be pulled.
        """
        job, size = prompt.job, self._config.params.block_size
        if prompt.states is None:
            tokens = tokens_of(job.prompt, job.images)
            prompt.states = self._memory.model.states(tokens, shift_of(job.adapter))
        start = prompt.num_cached + prompt.num_computed
        end = start + prompt.num_in_chunk
        self._memory.write_layer(layer, prompt.blocks, prompt.states[:end], start)
        if job.ticket_id not in self._writing:
            return
        first, last = (start // size if prompt.num_computed else 0), -(-end // size)
        layout = self._layout(job)
        at, width = layout.offset(layer, 0), layout.block_bytes
        out = in_host(self._agent.staging(_staging(job)))[at + first * width : at + last * width]
        self._memory.layers[layer].gather(prompt.blocks[first:last], out)
        if end < len(job.prompt):
            return
        self._agent.ready(job.ticket_id, layer + 1)
        failpoints.hit("prefill.layer")
        if layer + 1 == layout.num_layers:
            self._writing.discard(job.ticket_id)

    def complete(self, job: PrefillJob, blocks: list[int]) -> Ticket:
        """Stage a computed prompt that continues on another instance, and return its ticket."""
        if not self.is_per_layer(job):
            self._stage(job, blocks)
        failpoints.hit("prefill.staged")
        return self._ticket(job)

    def release(self, ticket_id: str) -> None:
        if ticket_id in self._legs:
            self._writing.discard(ticket_id)
            self._agent.release(ticket_id)

    def release_leg(self, leg: int) -> None:
        for ticket_id in [t for t, owner in self._legs.items() if owner == leg]:
            self.release(ticket_id)

    def closed(self, ticket_id: str) -> bool:
        """Forget a ticket that the agent has closed. Return False if it is unknown here."""
        self._writing.discard(ticket_id)
        return self._legs.pop(ticket_id, None) is not None

    def _stage(self, job: PrefillJob, blocks: list[int]) -> None:
        layout = self._layout(job)
        out = in_host(self._agent.staging(_staging(job)))
        self._memory.blocks.gather(blocks, out[: layout.total_bytes])
        self._legs[job.ticket_id] = job.leg
        self._agent.stage(
            job.ticket_id,
            job.attempt,
            _staging(job),
            layout,
            self._config.ticket_lease_s,
        )

    def _layout(self, job: PrefillJob) -> KvLayout:
        params = self._config.params
        num_blocks = -(-len(job.prompt) // params.block_size)
        fingerprint = self._config.model_fingerprint
        return KvLayout(params.num_layers, num_blocks, params.block_bytes, fingerprint)

    def _ticket(self, job: PrefillJob) -> Ticket:
        config = self._config
        return Ticket(
            ticket_id=job.ticket_id,
            request_id=job.request_id,
            attempt=job.attempt,
            instance_id=config.instance_id,
            incarnation=config.incarnation,
            model_fingerprint=config.model_fingerprint,
            num_tokens=len(job.prompt),
            kv_bytes=self._layout(job).total_bytes,
            addresses=(self.address,),
            lease_ms=round(1000 * config.ticket_lease_s),
        )


def _staging(job: PrefillJob) -> ArenaRange:
    assert job.staging is not None
    return job.staging
