"""LoRA adapters: what names one, whether it fits a model, and which ones an engine holds."""
