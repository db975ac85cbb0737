"""Grammars that bind an answer: compiled by llguidance, the same way in gateways and in engines."""
