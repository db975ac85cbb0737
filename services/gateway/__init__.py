"""The gateway: where clients call the mesh, over HTTP and gRPC."""
