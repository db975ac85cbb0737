"""Adapts the ratio of prefills to decodes to each kind of requests, and undoes harmful moves."""
