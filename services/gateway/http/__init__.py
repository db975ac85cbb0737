"""The HTTP endpoint: its paths with their descriptions, its requests and its answers."""
