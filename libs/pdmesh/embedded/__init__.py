"""NATS and Valkey as child processes with private directories: a mesh needs nothing installed."""
