"""The checks of `make audit` on our dependencies and code, with one module for each check.

Exceptions are in requirements/audit.yaml, each with its reason.
"""
