"""What moving and keeping KV costs: single pulls, device copies, tiers, and the effect on running
decodes.
"""
