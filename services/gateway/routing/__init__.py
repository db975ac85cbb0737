"""The instances and the master as this gateway sees them, and its streams to them."""
