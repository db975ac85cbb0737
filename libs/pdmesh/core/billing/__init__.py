"""Counts how long instances were used, and decides which account each of them counts for."""
