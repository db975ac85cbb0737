"""Simulates the mesh on a virtual clock: events instead of sockets join the services' own cores."""
