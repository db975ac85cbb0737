"""Small models that a newcomer can run without downloading from a model hub."""
