"""The commands of `pdmesh`, a module each."""
