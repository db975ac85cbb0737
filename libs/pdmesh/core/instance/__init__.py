"""One instance: which legs it is offered and takes, where their bytes lie, whether its engine still
works, and how it gets from blank to serving.
"""
