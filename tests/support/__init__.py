"""Helpers that several tests need to set up a mesh and its surroundings."""
