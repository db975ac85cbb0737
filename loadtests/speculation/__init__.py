"""Measures what proposing tokens costs and yields, by proposer."""
