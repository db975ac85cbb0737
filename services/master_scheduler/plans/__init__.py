"""Plans of moves, and upgrades: the loops that decide changes of groups and carry them out."""
