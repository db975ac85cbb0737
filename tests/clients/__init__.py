"""Programs of other clients, each run by its own Python: `run URL` prints one JSON object."""
