"""Plans and upgrades: the loops that ask for changes of groups, and carry them out."""
