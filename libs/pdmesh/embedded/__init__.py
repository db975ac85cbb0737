"""NATS and Valkey as child processes with private directories, so that a mesh needs nothing
installed.
"""
