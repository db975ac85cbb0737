"""Adapts the ratio of prefills to decodes to a scenario's requests, and undoes harmful moves."""
