"""LoRA adapters: how one is identified, whether it fits a model, and which ones an engine holds."""
