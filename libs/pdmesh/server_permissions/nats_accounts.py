"""Makes the block `accounts` of a nats-server's configuration from the table of roles.

JetStream and its buckets belong to an account without users. Every certificate has a user in a
separate account, which imports the subjects that its role may use. Permissions on subjects alone
would not be enough. NATS sends an answer to the subject that a request names, and does not check
whether the caller may publish there. So an instance could let the answer to a permitted request
overwrite the desired state. With separate accounts, an answer stays within the caller's account.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from pdmesh.core.access.process_identity import TRUST_DOMAIN, ProcessIdentity
from pdmesh.net import subjects
from pdmesh.net.nats.buckets import IMPORTED_API, INSTANCES, inbox_of
from pdmesh.server_permissions.role_permissions import ANY, NATS_ROLES, NatsAccess

DATA_ACCOUNT: Final = "pdmesh"
_API: Final = "$JS.API"

_HEAD: Final = """\
# Made by pdmesh: who may do what (docs/security.md). Each user is a certificate, by its URI; or,
# without an id, each certificate of the role, by its DNS name ROLE.TRUST-DOMAIN.
"""


@dataclass(frozen=True, slots=True)
class Holder:
    """A certificate, or all certificates of a role if the id is `*`."""

    role: str
    instance_id: str = ANY
    trust_domain: str = TRUST_DOMAIN

    @classmethod
    def of(cls, identity: ProcessIdentity) -> Holder:
        return cls(identity.role, identity.instance_id, identity.trust_domain)

    @property
    def user(self) -> str:
        """The name of the user, as NATS' `verify_and_map` finds it in a certificate."""
        identity = ProcessIdentity(self.role, self.instance_id, self.trust_domain)
        return identity.role_dns_name if self.instance_id == ANY else identity.uri

    @property
    def account(self) -> str:
        return self.role if self.instance_id == ANY else f"{self.role}/{self.instance_id}"

    @property
    def inbox(self) -> str:
        """The subjects of answers to this holder.

        If the id is `*`, these are the subjects of the whole role, because NATS knows only the
        role.
        """
        return f"{inbox_of(self.role, self.instance_id)}.>".replace(".*.>", ".>")


def nats_accounts(holders: Iterable[Holder]) -> str:
    """The text of the block `accounts`, for these certificates.

    Raises ValueError if a role is unknown, if a role is given both as a whole and with single ids,
    or if an account is in two trust domains.
    """
    known = sorted(set(holders), key=lambda holder: holder.account)
    _check(known)
    return _HEAD + "\n".join(["accounts {", *_data_account(), *_own_accounts(known), "}"]) + "\n"


def _check(holders: list[Holder]) -> None:
    all_of = {holder.role for holder in holders if holder.instance_id == ANY}
    for holder in holders:
        if holder.role not in NATS_ROLES:
            raise ValueError(f"no role is called {holder.role!r}: {', '.join(sorted(NATS_ROLES))}")
        if holder.role in all_of and holder.instance_id != ANY:
            raise ValueError(f"{holder.role}: name single ids, or the role alone, not both")
    accounts = [holder.account for holder in holders]
    if twice := next((a for a in accounts if accounts.count(a) > 1), None):
        raise ValueError(f"{twice} is named in two trust domains")


def _data_account() -> Iterator[str]:
    yield f"  {_text(DATA_ACCOUNT)}: {{"
    yield "    jetstream: enabled"
    yield f'    exports: [{{service: "$KV.>"}}, {{service: "{_API}.>"}}, {{stream: "_INBOX.>"}}]'
    yield "  }"


def _own_accounts(holders: list[Holder]) -> Iterator[str]:
    events = {holder: _told(NATS_ROLES[holder.role], holder.instance_id) for holder in holders}
    for holder in holders:
        access = NATS_ROLES[holder.role]
        entries, api = _entries(access, holder), tuple(_calls(access, holder))
        publish = (holder.inbox, *events[holder], *entries, *(f"{IMPORTED_API}.{c}" for c in api))
        yield f"  {_text(holder.account)}: {{"
        yield f"    users: [{{user: {_text(holder.user)}, permissions: {{"
        yield f"      publish: {_list(publish)}"
        yield f"      subscribe: {_list((holder.inbox, *access.hears))}"
        yield "    }}]"
        yield "    exports: ["
        yield from (f"      {{stream: {_text(event)}}}" for event in events[holder])
        yield "    ]"
        yield "    imports: ["
        yield from (_service(entry) for entry in entries)
        yield from (_service(f"{_API}.{call}", f"{IMPORTED_API}.{call}") for call in api)
        yield _stream(DATA_ACCOUNT, holder.inbox)
        for teller in holders:
            if teller is not holder:
                heard = (each for each in events[teller] if _is_heard(access, each))
                # NATS refuses two accounts that import the same subject from each other.
                back = {each for each in events[holder] if _is_heard(NATS_ROLES[teller.role], each)}
                yield from (_stream(teller.account, each) for each in heard if each not in back)
        yield "    ]"
        yield "  }"


def _told(access: NatsAccess, instance_id: str) -> tuple[str, ...]:
    return (*(subject(instance_id) for subject in access.tells_of_itself), *access.tells)


def _entries(access: NatsAccess, holder: Holder) -> tuple[str, ...]:
    """The subjects of the entries that the holder may write."""
    record = (f"$KV.{INSTANCES}.{holder.instance_id}",) if access.has_record else ()
    return (*record, *(f"$KV.{bucket}.*" for bucket in access.writes))


def _calls(access: NatsAccess, holder: Holder) -> Iterator[str]:
    """The calls of JetStream's API that the holder may make, without the API's prefix."""
    own = (f"{bucket}.{holder.instance_id}" for bucket in access.follows_own)
    followed = (*access.follows, *own)
    for entry in followed:
        bucket = entry.partition(".")[0]
        yield f"CONSUMER.CREATE.KV_{bucket}.*.$KV.{entry}"
    for bucket in dict.fromkeys(entry.partition(".")[0] for entry in followed):
        yield f"CONSUMER.DELETE.KV_{bucket}.*"
    yield from (f"STREAM.MSG.GET.KV_{bucket}" for bucket in access.reads)
    yield from (f"STREAM.INFO.KV_{bucket}" for bucket in access.inspects)
    for bucket in access.makes:
        yield from (f"STREAM.{verb}.KV_{bucket}" for verb in ("CREATE", "UPDATE"))


def _is_heard(access: NatsAccess, event: str) -> bool:
    """Whether the event's subject matches one of the patterns in `access.hears`."""
    kind = event.rpartition(".")[0]
    return any(heard in (subjects.ALL, f"{kind}.*") for heard in access.hears)


def _service(subject: str, to: str = "") -> str:
    renamed = f", to: {_text(to)}" if to else ""
    return (
        f"      {{service: {{account: {_text(DATA_ACCOUNT)}, subject: {_text(subject)}}}{renamed}}}"
    )


def _stream(account: str, subject: str) -> str:
    return f"      {{stream: {{account: {_text(account)}, subject: {_text(subject)}}}}}"


def _list(items: Iterable[str]) -> str:
    return "[" + ", ".join(map(_text, items)) + "]"


def _text(value: str) -> str:
    return f'"{value}"'  # ids, roles and subjects have nothing that must be escaped
