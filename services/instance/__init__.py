"""The blank instance: a process that takes the role which the master assigns."""
