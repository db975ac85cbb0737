"""The permissions of each role at NATS and Redis: a table, and files for the servers (ADR 0044).

The permissions of clients and operators in the mesh itself are in `core/access`.
"""
