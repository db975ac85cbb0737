"""Compares on-demand forwarding with queues at the prefills, for more and more users."""
