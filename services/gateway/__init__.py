"""The gateway: clients' way into the mesh, over HTTP and gRPC."""
