"""Decides which clients may call, and how much each tenant may use."""
