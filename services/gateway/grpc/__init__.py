"""The mesh's own API for clients, over gRPC."""
