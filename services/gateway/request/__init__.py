"""A client's call and its choices, from either API: the shell of `core.request`."""
