"""The real model through vLLM; `make e2e`."""
