"""What `make audit` checks of our dependencies and code, one module for each check. What it accepts
although a rule forbids it is in requirements/audit.yaml, with the reason.
"""
