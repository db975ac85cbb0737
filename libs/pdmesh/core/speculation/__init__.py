"""Speculation: which tokens a decode proposes to check in one step, and how many of them."""
