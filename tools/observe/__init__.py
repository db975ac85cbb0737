"""Defines Grafana's dashboards briefly, and writes them as JSON.

`python -m tools.observe` writes them to deploy/observe/grafana/dashboards.
"""
