"""KV blocks: how they are named, what they look like, in which tier they lie and how they travel."""
