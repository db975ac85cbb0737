"""A certificate's URI names a process, and the process's role decides which methods it may call."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh.core.access.process_identity import OPERATORS, ProcessIdentity, callers_of, folder_of
from pdmesh.v1 import (
    admin_service_pb2,
    inference_service_pb2,
    instance_service_pb2,
    kv_index_service_pb2,
    scheduler_service_pb2,
)

FILES = (
    admin_service_pb2,
    inference_service_pb2,
    instance_service_pb2,
    kv_index_service_pb2,
    scheduler_service_pb2,
)
METHODS = {
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def test_an_identity_is_read_from_its_own_uri() -> None:
    identity = ProcessIdentity("kv-cache-index", "eu-index-0", "mesh.example.org")
    assert identity.uri == "spiffe://mesh.example.org/kv-cache-index/eu-index-0"
    assert ProcessIdentity.from_uri(identity.uri) == identity
    assert identity.dns_name == "eu-index-0.kv-cache-index.mesh.example.org"
    assert str(identity) == "kv-cache-index/eu-index-0"
    assert folder_of(Path("/t"), identity) == Path("/t/kv-cache-index/eu-index-0")


@pytest.mark.parametrize(
    "uri",
    [
        "", "https://pdmesh/prefill/p-0", "spiffe://pdmesh/prefill", "spiffe://pdmesh/prefill/",
        "spiffe:///prefill/p-0", "spiffe://pdmesh/prefill/p-0/x", "spiffe://pdmesh/prefill/..",
        "spiffe://pdmesh/Prefill/p-0", "spiffe://pdmesh/prefill/p-0\n", "spiffe://pdmesh/prefill/p*",
        "spiffe://pdmesh/prefill/p-0?x", "spiffe://pd mesh/prefill/p-0",
    ],
)  # fmt: skip
def test_another_uri_names_no_process(uri: str) -> None:
    with pytest.raises(ValueError, match="spiffe"):
        ProcessIdentity.from_uri(uri)


def test_every_method_of_the_mesh_has_callers() -> None:
    """A new method without a line in the table would be refused to all callers."""
    assert {method for method in METHODS if callers_of(method) == frozenset()} == set()


def test_a_method_that_is_not_listed_may_be_called_by_nobody() -> None:
    for method in ("/pdmesh.v1.InstanceService/Other", "/nobody.Service/Method", "", "/"):
        assert callers_of(method) == frozenset()


def test_the_gateways_port_alone_is_for_everyone() -> None:
    public = {method for method in METHODS if callers_of(method) is None}
    assert public == {m for m in METHODS if m.startswith("/pdmesh.v1.InferenceService/")}


def test_only_operators_may_use_the_admin_api_and_only_gateways_plan() -> None:
    admin = {m for m in METHODS if m.startswith("/pdmesh.v1.AdminService/")}
    assert {callers_of(m) for m in admin} == {OPERATORS}
    assert callers_of("/pdmesh.v1.SchedulerService/PlanStream") == {"gateway"}
