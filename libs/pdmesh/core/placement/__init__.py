"""Ranks the instances that may serve a request, by their records, health and load."""
