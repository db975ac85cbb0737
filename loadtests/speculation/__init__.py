"""What proposing tokens costs and yields, by proposer."""
