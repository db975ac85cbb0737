"""Decides where requests go: follows the fleet and its KV blocks; the leader ranks instances."""
