"""Whether a mesh of thousands of instances can be decided for: what it costs, and what it gives."""
