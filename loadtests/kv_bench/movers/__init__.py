"""What moves KV in a comparison: the product, block-by-block baselines, and other libraries."""
