"""Data-parallel domains, whose ranks compute one model together and are one member of a group."""
