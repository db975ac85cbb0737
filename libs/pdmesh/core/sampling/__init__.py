"""How the tokens of a request are drawn, how many they may be, and which text ends its answer."""
