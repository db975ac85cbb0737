"""Checks bearer tokens of an OpenID provider, whose keys are fetched in the background."""
