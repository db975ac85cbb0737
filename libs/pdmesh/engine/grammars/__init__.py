"""Grammars that constrain answers. Gateways and engines compile them alike, with llguidance."""
