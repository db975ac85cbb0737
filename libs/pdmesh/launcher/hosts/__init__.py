"""A mesh over several hosts (ADR 0050).

A file describes the hosts. Each host has a folder with its settings and secrets. Some of the hosts
run NATS and Redis as clusters.
"""
