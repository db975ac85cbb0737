"""Generators of committed files; `make docs` runs them."""
