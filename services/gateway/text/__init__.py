"""From text to tokens and back: templates, tokenizers, prompts, and the text of a stream."""
