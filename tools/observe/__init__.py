"""Grafana's dashboards, made from short definitions: `python -m tools.observe` writes
deploy/observe/grafana/dashboards.
"""
