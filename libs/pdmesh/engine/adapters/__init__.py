"""LoRA adapters of an engine: reads, verifies, copies, loads and unloads them."""
