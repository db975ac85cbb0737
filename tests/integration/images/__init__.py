"""Tests of images in prompts, through a gateway or a whole mesh of simulated engines."""
