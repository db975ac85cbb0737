"""The mesh on a virtual clock: the services' own cores, joined by events instead of sockets."""
