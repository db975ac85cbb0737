"""Tests of images with vLLM engines and whole meshes. Answers must equal plain vLLM's."""
