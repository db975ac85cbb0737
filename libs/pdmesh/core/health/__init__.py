"""Which instances are alive, which are faulty at which level, how many may be ejected at once, and
when a gateway is ready.
"""
