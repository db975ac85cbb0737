"""What only a GPU can show of the KV path: the operators, the copies beside the model, the draws,
and KV from one GPU's cache into another's over UCX.
"""
