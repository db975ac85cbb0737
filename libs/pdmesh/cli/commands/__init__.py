"""The commands of `pdmesh`, one module each."""
