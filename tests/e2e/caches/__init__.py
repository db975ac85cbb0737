"""Models with other kinds of KV cache than full attention: each through prefill and decode."""
