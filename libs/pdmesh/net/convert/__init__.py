"""Converts between messages of the contracts and the core, where several services need it."""
