"""What moving and keeping KV costs beside the rest: single pulls, device copies, tiers, and what
running decodes feel of it.
"""
