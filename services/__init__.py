"""One package per service; services talk through `proto/` only, never by importing each other."""

import pdmesh  # noqa: F401  before grpc is imported: see pdmesh.grpc_environment
