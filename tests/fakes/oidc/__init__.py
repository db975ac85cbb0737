"""A real OpenID provider, which runs in its own process."""
