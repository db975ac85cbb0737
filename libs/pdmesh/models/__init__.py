"""Small models for first tries, which need no download from a model hub."""
