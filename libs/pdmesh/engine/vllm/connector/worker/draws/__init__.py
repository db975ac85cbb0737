"""Makes an answer that several vLLM engines draw equal to the answer of a single engine."""
