"""Small models that a newcomer can run without a download site."""
