"""Tests of images with vLLM engines and whole meshes."""
