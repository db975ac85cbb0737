"""Decides which models a mesh serves, which model a name means, and which tokenizers stay in
memory.
"""
