"""The KV of prompts and answers: names of blocks, their layout, storage tiers, and transfer."""
