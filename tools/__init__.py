"""Generators of committed files, most of which `make docs` runs, and checks of the repository."""
