"""Proxies before gateways, as real processes."""
