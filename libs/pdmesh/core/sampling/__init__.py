"""How the tokens of a request are drawn, and which text ends its answer."""
