"""Which KV is where: the names of blocks, which instances hold them, and what operators pin."""
