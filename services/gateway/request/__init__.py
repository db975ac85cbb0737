"""A client's call and its choices, whatever API it came by: the shell of `core.request`."""
