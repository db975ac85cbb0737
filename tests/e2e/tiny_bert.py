"""Writes a BERT of random weights with a WordPiece tokenizer.

The model is an embedding model or a cross-encoder. Its weights have a large variance. So a vector
depends on every token, and on which text of a pair each token belongs to.
"""

from __future__ import annotations

import string
from pathlib import Path

MAX_LENGTH = 128


def write_tiny_bert(directory: Path, *, scores_pairs: bool) -> Path:
    """Write a model of about 2 MB, with the same weights each time."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

    directory.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    words += [f"##{letter}" for letter in string.ascii_lowercase]
    words += ["the", "capital", "of", "france", "is", "paris", ".", "?"]
    vocabulary = directory / "vocab.txt"
    vocabulary.write_text("\n".join(words) + "\n")
    BertTokenizerFast(str(vocabulary), model_max_length=MAX_LENGTH).save_pretrained(directory)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.3,
        num_labels=1,
    )
    kind = BertForSequenceClassification if scores_pairs else BertModel
    kind(config).save_pretrained(directory)
    return directory
