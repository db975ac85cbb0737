"""The blank instance: a process that takes the role that the master assigns."""
