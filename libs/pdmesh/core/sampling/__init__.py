"""How a request's tokens are drawn, how many it may have, and which text ends its answer."""
