"""Realistic requests: workloads, the loops that send them, and a page on the answers."""
