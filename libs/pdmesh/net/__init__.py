"""Communication between processes: events (bus), presence (registry), calls (gRPC)."""
