"""The `pdmesh` command, which starts, stops and inspects a mesh.

Libraries that are slow to import are imported only by the commands that need them.
"""
