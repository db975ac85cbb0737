"""The prefill service: its settings and its entry point."""
