"""Decides who a process, a client or an operator is, and which methods each of them may call; when
the keys of tokens are fetched; and what may be exposed without a key or TLS.
"""
