"""Which models a mesh serves, what a request's names mean, and which tokenizers stay in memory."""
