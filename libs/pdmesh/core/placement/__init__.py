"""Decides where a request may go, best first, from a picture of all instances."""
