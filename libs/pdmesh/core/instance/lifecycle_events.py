"""The events and effects of an instance from its start to its end; see `lifecycle.py`.

An assignment is the master's order to one instance. It has a role spec, which says what the
instance should be, and the instance's peers. The peers of a decode are the prefills of its group.
"""

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
    failure: str  # a stable reason, a colon, and a description


@dataclass(frozen=True, slots=True)
class PeerVerified:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerFailed:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class BecameIdle:
    """No request runs, no staged KV waits for a decode, and new requests are refused."""


Event = Assigned | Loaded | LoadFailed | PeerVerified | PeerFailed | BecameIdle | Tick


@dataclass(frozen=True, slots=True)
class LoadEngine:
    """Fetch, check and load what the role spec needs. Refuse requests until `AdmitRequests`."""

    role_spec: RoleSpec


@dataclass(frozen=True, slots=True)
class Verify:
    """Pull a test transfer from the peer. The answer is PeerVerified or PeerFailed."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class ForgetPeer:
    """Close the connections to a peer that has left (S26)."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class AdmitRequests:
    """Take requests from now on."""


@dataclass(frozen=True, slots=True)
class RefuseRequests:
    """Take no new request, finish those that run, and keep staged KV until its tickets close.

    The answer is BecameIdle.
    """


@dataclass(frozen=True, slots=True)
class Erase:
    """Stop everything and forget all state.

    The process continues without a role, as a new incarnation. This is the last effect of the old
    incarnation.
    """


class Ignored(enum.Enum):
    """Why the instance does not follow an assignment."""

    OTHER_INCARNATION = "meant for another incarnation"
    OLDER = "older than the last one"
    OTHER_ROLE = "another role spec before it was blank"
    OVER = "this incarnation is over"


Effect = LoadEngine | Verify | ForgetPeer | AdmitRequests | RefuseRequests | Erase | Ignored
