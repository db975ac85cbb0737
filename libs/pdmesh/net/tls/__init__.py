"""Mutual TLS between the mesh's processes: the process's certificate, and an own authority."""
