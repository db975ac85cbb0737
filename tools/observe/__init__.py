"""Defines Grafana's dashboards in a short form, and writes them as JSON.

`python -m tools.observe` writes them to deploy/observe/grafana/dashboards.
"""
