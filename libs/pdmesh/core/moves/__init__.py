"""Changes of groups as plans of single moves: what a move may do, which is next, and what the clock asks for."""
