"""Runs NATS and Valkey as child processes, so that a mesh needs no servers installed."""
