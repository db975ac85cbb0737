"""What a master shows operators: the mesh now, and what it received in the last hour."""
