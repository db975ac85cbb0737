"""One incarnation of an instance: what it shall be, how it loads, what it says of itself, and its
serving from listening to the last goodbye.
"""
