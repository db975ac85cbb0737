"""Decides how processes, clients and operators are identified, and which methods each may call.

It also decides when the keys of tokens are fetched, and what may be exposed without a key or TLS.
"""
