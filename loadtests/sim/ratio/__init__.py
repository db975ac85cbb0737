"""What the right ratio of prefills to decodes gains, and whether the loop finds it, all on the
virtual clock (`make bench NAME=ratio`).
"""
