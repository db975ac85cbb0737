"""The tiers for KV below the engine: host memory, the host memory of peers, and files.

The modules decide which blocks are loaded from which tier, which blocks a full tier evicts, which
blocks are held for paused sessions, and whether a disk may be used.
"""
