"""Measures what the hand-over of a prompt's KV from prefill to decode costs a client on vLLM."""
