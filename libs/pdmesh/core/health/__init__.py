"""Decides which processes are alive, which instances are faulty, how many of these may be ejected
at once, and when a gateway is ready.

To eject an instance is to take it out of service because of a fault.
"""
