"""Decides who a caller is by the claims of its token, which role it has, and when the keys of
tokens are fetched.
"""
