"""Mutual TLS between the mesh's processes: this process's certificate, and how the dev mesh makes
certificates.
"""
