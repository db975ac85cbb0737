"""Bearer tokens of an OpenID provider: its keys, fetched beside the requests, and what a valid
token claims.
"""
