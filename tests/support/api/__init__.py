"""Helpers that compare the gateway's HTTP and gRPC APIs, and check them against `/openapi.json`."""
