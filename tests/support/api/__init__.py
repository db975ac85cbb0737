"""The gateway through both of its APIs, and against its own description."""
