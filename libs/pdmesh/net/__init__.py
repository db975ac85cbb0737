"""Talking to other processes: events (bus), liveness (registry), calls (rpc)."""
