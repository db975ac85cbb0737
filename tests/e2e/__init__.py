"""End-to-end tests with vLLM and real or tiny models, which `make e2e` runs."""
