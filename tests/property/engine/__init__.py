"""Properties of what we set around an engine."""
