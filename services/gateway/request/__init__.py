"""A client's call and its choices, over HTTP or gRPC: the shell of `core.request`."""
