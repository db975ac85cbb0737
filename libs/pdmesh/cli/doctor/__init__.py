"""What `pdmesh doctor` examines, one module for each place: the machine, the settings, the
mesh, the certificates."""
