"""One instance: which legs it takes, where their bytes lie, whether its engine still works, and how
it gets from blank to serving.
"""
