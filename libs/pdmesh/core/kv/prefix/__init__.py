"""Which KV is where: the names of blocks, who holds them, and what operators pin."""
