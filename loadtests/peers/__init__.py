"""Other serving stacks beside ours, in one run on one machine: who carries more, and who answers
first.
"""
