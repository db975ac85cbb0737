"""Commands that show a mesh's state, logs and events, and change nothing."""
