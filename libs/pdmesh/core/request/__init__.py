"""Decides the life of one request in a gateway: where it goes next, when it waits, how it ends.

A call of a client may ask for several answers, its choices. Each choice is one such request.
"""
