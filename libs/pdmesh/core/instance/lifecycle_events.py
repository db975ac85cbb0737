"""What happens to an instance on its way between blank and serving, and what is to be done about it. See `instance_life`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pdmesh.core.placement.fleet import Role


class Stage(enum.IntEnum):
    """How far the master lets an instance go. The numbers are those of `pdmesh.v1.Stage`."""

    LOAD = 1
    CONNECT = 2
    SERVE = 3
    DRAIN = 4
    BLANK = 5


class Phase(enum.IntEnum):
    """How far it is. The numbers are those of `pdmesh.v1.InstancePhase`."""

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
    """An instance of the same group. `addresses` are of its KV transport, one per device, in device order (S14)."""

    id: PeerId
    role: Role
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Duty:
    """What an instance is to be. It never changes within an incarnation."""

    role: Role
    group_id: str
    scenario: str
    revision: str = ""  # of model, KV layout and transport
    model: str = ""  # the name clients use
    model_dir: str = ""  # empty: as the instance's settings say
    manifest: str = ""  # path of the artefact's manifest; empty: the model is loaded unchecked
    options: tuple[tuple[str, str], ...] = ()  # settings of the instance, by name
    spans_regions: bool = False  # KV of its group may go from one region to another


@dataclass(frozen=True, slots=True)
class Assignment:
    """The master's word. Mirrors `pdmesh.v1.Assignment`."""

    incarnation: int
    epoch: int
    assignment_id: int
    stage: Stage
    duty: Duty
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class Assigned:
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine is there, with the duty's model."""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    failure: str  # a stable reason, a colon, and what went wrong


@dataclass(frozen=True, slots=True)
class PeerVerified:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerFailed:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class BecameIdle:
    """No request runs and no staged KV waits; none can come while requests are refused."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Sent about twice a second."""


Event = Assigned | Loaded | LoadFailed | PeerVerified | PeerFailed | BecameIdle | Tick


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch, check and load what the duty needs; requests are refused until `Admit`."""

    duty: Duty


@dataclass(frozen=True, slots=True)
class Verify:
    """Pull a probe from the peer; answered by PeerVerified or PeerFailed."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class ForgetPeer:
    """The peer left: close the connections to it (S26)."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Admit:
    """Take requests from now on."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Take nothing new, finish what runs, keep staged KV until its leases end; answered by BecameIdle."""


@dataclass(frozen=True, slots=True)
class Erase:
    """Stop everything and forget it; the process goes on as a blank one, under a new incarnation. Last of all."""


class Ignored(enum.Enum):
    """Why an assignment is not followed."""

    OTHER_INCARNATION = "meant for another incarnation"
    OLDER = "older than one that was seen"
    OTHER_DUTY = "another duty, without having been erased"
    OVER = "this incarnation is over"


Effect = Load | Verify | ForgetPeer | Admit | Refuse | Erase | Ignored
