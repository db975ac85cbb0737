"""The accounts of nats-server: the users, their permissions, and names that are refused."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from pdmesh.core.access.process_identity import ProcessIdentity
from pdmesh.net import subjects
from pdmesh.net.nats.buckets import ALL_BUCKETS
from pdmesh.server_permissions.nats_accounts import Holder, nats_accounts
from pdmesh.server_permissions.role_permissions import ANY, NATS_ROLES

CHART = Path(__file__).resolve().parents[3] / "deploy/helm/pdmesh/files/nats-accounts.conf"


def account(text: str, name: str) -> str:
    """The text of one account's block."""
    return text.partition(f'  "{name}": {{\n')[2].partition("\n  }\n")[0]


def listed(block: str, what: str) -> set[str]:
    (found,) = re.findall(rf"^ +{what}: \[(.*)\]$", block, re.MULTILINE)
    return set(re.findall(r'"([^"]+)"', found))


def test_a_worker_may_write_its_own_record_and_no_other_entry() -> None:
    text = nats_accounts([Holder("prefill", "p-0"), Holder("prefill", "p-1")])
    allowed = listed(account(text, "prefill/p-0"), "publish")
    assert {each for each in allowed if each.startswith("$KV.")} == {"$KV.pdmesh-instances.p-0"}
    imported = set(re.findall(r'subject: "(\$KV[^"]+)"', account(text, "prefill/p-0")))
    assert imported == {"$KV.pdmesh-instances.p-0"}


def test_a_user_is_the_uri_of_its_certificate_or_the_dns_name_of_all_of_its_role() -> None:
    one = ProcessIdentity("gateway", "g-0", "example.org")
    text = nats_accounts([Holder.of(one), Holder("decode", trust_domain="example.org")])
    assert re.findall(r'user: "([^"]+)"', text) == ["decode.example.org", one.uri]


def test_operators_may_write_nothing() -> None:
    block = account(nats_accounts([Holder("operator", "ann")]), "operator/ann")
    verbs = {
        each for each in listed(block, "publish") if not each.startswith("_INBOX.operator.ann")
    }
    reads = r"\$PDMESH\.API\.(CONSUMER\.(CREATE|DELETE)|STREAM\.(INFO|MSG\.GET))\."
    assert all(re.match(reads, each) for each in verbs)


def test_events_are_imported_only_by_those_who_hear_them() -> None:
    text = nats_accounts(
        [Holder("prefill", "p"), Holder("kv-cache-index", "i"), Holder("gateway", "g")]
    )
    assert '{account: "prefill/p", subject: "mesh.v1.kv.blocks.p"}' in account(
        text, "kv-cache-index/i"
    )
    assert "mesh.v1.load" not in account(text, "kv-cache-index/i")
    assert 'account: "prefill/p"' not in account(text, "gateway/g")


def test_every_event_and_every_bucket_is_somebodys() -> None:
    """An event or bucket without a role would be refused to all processes."""
    events = {
        made(ANY)
        for name, made in inspect.getmembers(subjects, inspect.isfunction)
        if not name.startswith("_")
    }
    roles = NATS_ROLES.values()
    told = {s(ANY) for role in roles for s in role.tells_of_itself} | {
        each for role in roles for each in role.tells
    }
    assert told == events
    assert {each for role in roles for each in role.writes} == {*ALL_BUCKETS} - {"pdmesh-instances"}


@pytest.mark.parametrize(
    ("holders", "problem"),
    [
        ([Holder("intern", "ann")], "no role is called 'intern'"),
        (
            [Holder("gateway"), Holder("gateway", "g")],
            "gateway: name single ids, or the role alone",
        ),
        ([Holder("gateway", "g"), Holder("gateway", "g", "other")], "two trust domains"),
    ],
)
def test_what_nats_could_not_tell_apart_is_refused(holders: list[Holder], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        nats_accounts(holders)


def test_no_two_accounts_take_the_same_subject_from_each_other() -> None:
    """nats-server does not start if two accounts import a subject from each other. This is possible
    for two masters, which publish events about the same groups.
    """
    holders = [Holder(role, f"{role}-{i}") for role in NATS_ROLES for i in range(2)]
    text = nats_accounts(holders)
    stream = re.compile(
        r'^ +\{stream: \{account: "([^"]+)", subject: "(mesh[^"]+)"\}\}$', re.MULTILINE
    )
    taken = {
        (holder.account, *found)
        for holder in holders
        for found in stream.findall(account(text, holder.account))
    }
    assert taken
    assert {each for each in taken if (each[1], each[0], each[2]) in taken} == set()


def test_the_chart_has_the_accounts_of_this_release() -> None:
    """If this fails, run `make docs`, which writes them."""
    assert CHART.read_text() == nats_accounts([Holder(role) for role in NATS_ROLES])
