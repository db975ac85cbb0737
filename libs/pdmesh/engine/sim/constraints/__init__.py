"""Constraints of answers in the simulated engine: their compilation, and the draws under them."""
