"""The transfer agent of one rank: stages KV for others to pull, and pulls from others."""
