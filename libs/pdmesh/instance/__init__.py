"""The instance process of all roles: its lives one after the other, and the legs that it
serves in them.
"""
