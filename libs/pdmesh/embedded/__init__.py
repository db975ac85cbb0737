"""Runs NATS and Valkey as child processes, so that users of a mesh need not run these servers."""
