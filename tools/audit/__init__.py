"""What `make audit` checks of our dependencies and code, one module for each check. The
exceptions are in requirements/audit.yaml, each with its reason.
"""
