"""Reads, verifies, copies, loads and unloads the LoRA adapters of an engine."""
