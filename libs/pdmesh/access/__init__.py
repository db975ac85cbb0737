"""What each role may do at NATS and Redis: one table, and files for the servers (ADR 0044)."""
