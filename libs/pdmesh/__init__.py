"""pdmesh serves LLMs with prefill and decode on different instances, as an event-driven mesh."""

from pdmesh import grpc_environment

__version__ = "0.1.0"

grpc_environment.prepare()
