"""Decides how many prefills and decodes a scenario needs, and undoes a move that did harm."""
