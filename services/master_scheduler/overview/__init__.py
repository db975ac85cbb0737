"""What a master shows operators: the present state of the mesh, and events of the last hour."""
