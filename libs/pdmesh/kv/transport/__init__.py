"""Moving bytes between two processes: the Protocol, and UCX."""
