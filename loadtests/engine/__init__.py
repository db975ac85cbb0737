"""What an engine does with its time, without a mesh."""
