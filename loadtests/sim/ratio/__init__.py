"""What the right ratio of prefills to decodes is worth, and whether the loop finds it, all on the
virtual clock (`make bench NAME=ratio`).
"""
