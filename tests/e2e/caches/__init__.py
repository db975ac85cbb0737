"""Tests of a prefill and a decode with models whose KV caches are not those of full attention."""
