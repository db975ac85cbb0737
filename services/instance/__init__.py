"""The instance without a fixed role: a process that takes the role that the master assigns."""
