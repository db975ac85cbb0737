"""Decides which models a mesh serves, what names mean, and which tokenizers stay in memory."""
