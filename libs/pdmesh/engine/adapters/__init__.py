"""LoRA adapters at an engine: read, verified, copied, loaded on first use, unloaded when idle."""
