"""Types that several packages share: roles, stages, phases, and the master's assignments.

The leading master assigns a role in a group to each instance, and says how far the instance may go.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Role(enum.Enum):
    NONE = "none"
    PREFILL = "prefill"
    DECODE = "decode"
    FUSION = "fusion"
    POOLING = "pooling"
    ENCODER = "encoder"


class Stage(enum.IntEnum):
    """How far the master lets an instance go. At BLANK, the instance has no role.

    The numbers equal those of `pdmesh.v1.Stage`.
    """

    LOAD = 1
    CONNECT = 2
    SERVE = 3
    DRAIN = 4
    BLANK = 5


class Phase(enum.IntEnum):
    """How far an instance has come. At BLANK, the instance has no role.

    The numbers equal those of `pdmesh.v1.InstancePhase`.
    """

    BLANK = 1
    LOADING = 2
    LOADED = 3
    CONNECTING = 4
    CONNECTED = 5
    READY = 6
    DRAINING = 7
    DRAINED = 8
    FAILED = 9


@dataclass(frozen=True, slots=True, order=True)
class PeerId:
    instance_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Peer:
    """An instance of the same group and of the other role.

    `addresses` are the addresses of the peer's KV transport: one per device, in device order (S14).
    """

    id: PeerId
    role: Role
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DomainRank:
    """An instance's place in a data-parallel domain. Mirrors `pdmesh.v1.Domain` (S75, S121).

    The instances of a domain compute one model together. Each instance has its own requests and its
    own KV, but the engines of a mixture-of-experts model run their steps at the same time. So a
    domain is set up, drained and replaced as a whole. A newly formed domain gets a `domain_id` that
    is never used again.
    """

    domain_id: str
    dp_rank: int  # 0 .. dp_size - 1
    dp_size: int
    address: str = ""  # host:port of rank 0, to which the ranks' engines connect


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """The role that the master wants an instance to have.

    The role never changes within an incarnation, which is one life of an instance.
    """

    role: Role
    group_id: str
    scenario: str
    revision: str = ""  # names the service's model, KV layout and transport
    model: str = ""  # the model's name for clients
    model_dir: str = ""  # folder of the model; if empty, the instance's settings name it
    # Path of the manifest, which lists the model's files. If empty, the model is loaded unchecked.
    manifest: str = ""
    options: tuple[tuple[str, str], ...] = ()  # settings of the instance, by name
    spans_regions: bool = False  # the group's KV may go from one region to another
    domain: DomainRank | None = None  # None: the instance computes alone


@dataclass(frozen=True, slots=True)
class Assignment:
    """The master's order to an instance. Mirrors `pdmesh.v1.Assignment`."""

    incarnation: int
    epoch: int
    assignment_id: int
    stage: Stage
    role_spec: RoleSpec
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. State machines of this package get this event at intervals."""
