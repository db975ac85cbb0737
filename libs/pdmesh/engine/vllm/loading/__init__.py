"""Reads weight files once per node, in order, and hands their tensors to each rank (S84 to S88)."""
