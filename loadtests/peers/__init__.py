"""Other serving stacks beside ours, in one run on one machine: which carries more, and which
answers first.
"""
