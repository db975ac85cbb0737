"""What groups should be and what they are: which instance joins or leaves, in which region, and
when a step has taken too long.
"""
