"""What a master shows operators: the mesh now, and what it heard of the last hour."""
