"""The mesh's decisions: pure and synchronous, without I/O and without a clock.

A decision is a function, or an object with state. Most of the larger objects change only by
`handle(event, now) -> effects`.
"""
