"""The names of KV blocks, the index of the instances that hold them, and pinned prefixes."""
