"""What groups shall be and what they are: who joins, who leaves, in which region, and when a step took
too long.
"""
