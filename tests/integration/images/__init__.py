"""Images through a whole sim mesh."""
