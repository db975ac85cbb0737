"""The decode service: its settings and its entry point."""
