"""KV blocks: how they are named, how they look, in which tier they lie and how they travel."""
