"""Mutual TLS between the mesh's processes: their certificates, and the mesh's own authority."""
