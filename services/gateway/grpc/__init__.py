"""The mesh's own client API, over gRPC."""
