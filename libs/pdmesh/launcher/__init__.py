"""The launcher of `pdmesh up`, which runs a mesh's services and servers as its child processes."""
