"""The `pdmesh` command: start, stop and look at a mesh.

Slow libraries are imported by the command that needs them.
"""
