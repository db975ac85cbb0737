"""A real OpenID provider, as a process of its own."""
