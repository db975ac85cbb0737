"""Communication between processes: events (bus), liveness (registry), calls (rpc)."""
