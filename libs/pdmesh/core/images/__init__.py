"""Images in prompts: how large they may be, where they come from, which tokens stand for them."""
