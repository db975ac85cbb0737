"""The `pdmesh` command: starts, stops and inspects a mesh.

Only the commands that need a slow library import it.
"""
