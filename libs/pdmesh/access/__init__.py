"""Who may do what at NATS and Redis: one table, and the servers' files made from it (ADR 0044)."""
