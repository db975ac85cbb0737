"""Decides how processes, clients and operators are identified, and which methods each may call.

This package also decides when to fetch the keys that verify tokens, and what may be exposed without
a key or TLS.
"""
