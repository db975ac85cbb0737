"""What placement decides and at which cost: plans, the index, how old its knowledge is, and
policies side by side.
"""
