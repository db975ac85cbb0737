"""Changes of groups as plans of moves: what a move may do, which is next, what a schedule asks."""
