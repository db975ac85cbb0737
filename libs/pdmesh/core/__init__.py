"""The decisions of pdmesh, which serves LLMs with prefill and decode on different instances.

The code here is pure and synchronous. It does no I/O and reads no clock. A decision is a function,
or an object with state. Most of the larger objects change only by `handle(event, now) -> effects`.
"""
