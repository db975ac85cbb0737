"""Commands that look at a mesh and change nothing."""
