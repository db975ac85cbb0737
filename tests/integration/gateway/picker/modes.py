"""Changes that tests make to the configuration of Envoy. Envoy asks the mesh's endpoint picker
which gateway takes a request.
"""

from __future__ import annotations

from typing import Any, Final

from tests.support.proxies.envoy import Config, cluster_of, ext_proc, manager_of

_SUBSET: Final = "x-gateway-destination-endpoint-subset"


def as_deployed(config: Config) -> None: ...


def buffered(config: Config) -> None:
    mode = ext_proc(config)["processing_mode"]
    mode |= {"request_body_mode": "BUFFERED", "request_trailer_mode": "SKIP"}


def duplex_both_ways(config: Config) -> None:
    """Configure Envoy like a gateway of the Gateway API Inference Extension."""
    mode = ext_proc(config)["processing_mode"]
    mode |= {"response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND"}


def streamed(config: Config) -> None:
    ext_proc(config)["processing_mode"]["request_body_mode"] = "STREAMED"


def failing_open(config: Config) -> None:
    """Envoy continues without a picker if no picker answers. It must not retry first, because after
    a retry it has no body left for the request.
    """
    ext_proc(config)["failure_mode_allow"] = True
    del ext_proc(config)["grpc_service"]["retry_policy"]


def by_header(config: Config) -> None:
    """Envoy takes the endpoint from the header instead of the metadata, and does not remove the
    header from clients' requests.
    """
    policy = cluster_of(config, "gateways")["load_balancing_policy"]["policies"][0]
    override = policy["typed_extension_config"]["typed_config"]
    override["override_host_sources"] = [{"header": "x-gateway-destination-endpoint"}]
    del manager_of(config)["early_header_mutation_extensions"]


def only(addresses: list[str]) -> Any:
    """A change by which Envoy lets the picker choose only from these endpoints."""

    def change(config: Config) -> None:
        kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
        value = {_SUBSET: addresses}
        hint = {"metadata_namespace": "envoy.lb.subset_hint", "value": value}
        allowed = {"@type": kind, "metadata": [hint]}
        filters = manager_of(config)["http_filters"]
        filters.insert(0, {"name": "envoy.filters.http.set_metadata", "typed_config": allowed})

    return change


MODES: Final = [as_deployed, buffered, duplex_both_ways]
