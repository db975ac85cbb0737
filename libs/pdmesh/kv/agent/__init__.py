"""The KV agent of one rank: stages KV for other agents to pull, and pulls KV from them."""
