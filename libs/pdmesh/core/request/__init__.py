"""One choice of a request at the gateway: which leg it is on, what is tried next, when it waits,
when it ends, and with which error; and how a call of several choices ended.
"""
