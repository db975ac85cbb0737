"""Data-parallel domains: how instances become the ranks of one, and one member of a group."""
