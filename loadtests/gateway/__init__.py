"""Measures the time and memory that the mesh adds to its engine, and how much load it carries.

The results are compared with the bare engine and with other gateways.
"""
