"""Images in prompts: what is an image, where it may come from, and which tokens stand for it."""
