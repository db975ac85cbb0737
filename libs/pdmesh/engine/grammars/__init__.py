"""Grammars for answers, which gateways and engines compile in the same way, with llguidance."""
