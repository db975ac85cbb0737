"""Images in prompts: how large they may be, where they come from, and which tokens stand
for them.
"""
