"""The examinations of `pdmesh doctor`: the machine, the settings, the mesh, the certificates."""
