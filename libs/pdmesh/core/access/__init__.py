"""Decides who a client or an operator is by the claims of its token, which calls an operator's role
may make, and when the keys of tokens are fetched.
"""
