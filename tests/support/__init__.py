"""Helpers for tests: they start meshes and servers, send requests, and measure the results."""
