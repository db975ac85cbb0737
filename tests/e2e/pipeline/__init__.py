"""Tests of engines with several pipeline stages, each of which has some of the model's layers."""
