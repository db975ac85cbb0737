"""Turns text into tokens and back: templates, tokenizers, prompts, and the text of a stream."""
