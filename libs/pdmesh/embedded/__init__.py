"""Runs NATS and Valkey as child processes, so that a mesh needs no servers of the user's."""
