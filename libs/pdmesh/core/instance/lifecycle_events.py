"""What happens to an instance between blank and serving, and what to do; see `lifecycle.py`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pdmesh.core.model import Assignment, Peer, PeerId, RoleSpec, Tick


@dataclass(frozen=True, slots=True)
class Assigned:
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine has loaded the role spec's model."""


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


Event = Assigned | Loaded | LoadFailed | PeerVerified | PeerFailed | BecameIdle | Tick


@dataclass(frozen=True, slots=True)
class LoadEngine:
    """Fetch, check and load what the role spec needs; refuse requests until `AdmitRequests`."""

    role_spec: RoleSpec


@dataclass(frozen=True, slots=True)
class Verify:
    """Pull a probe from the peer; answered by PeerVerified or PeerFailed."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class ForgetPeer:
    """The peer has left: close the connections to it (S26)."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class AdmitRequests:
    """Take requests from now on."""


@dataclass(frozen=True, slots=True)
class RefuseRequests:
    """Take no new request, finish what runs, and keep staged KV until its leases end.

    Answered by BecameIdle.
    """


@dataclass(frozen=True, slots=True)
class Erase:
    """Stop everything and forget it; the process continues blank, as a new incarnation.

    The last effect.
    """


class Ignored(enum.Enum):
    """Why an assignment is not followed."""

    OTHER_INCARNATION = "meant for another incarnation"
    OLDER = "older than the last one"
    OTHER_ROLE = "another role spec before it was blank"
    OVER = "this incarnation is over"


Effect = LoadEngine | Verify | ForgetPeer | AdmitRequests | RefuseRequests | Erase | Ignored
