"""Models with KV caches other than full attention's, through prefill and decode."""
