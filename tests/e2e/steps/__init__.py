"""Tests of the steps of vLLM engines with the mesh's connector, without services."""
