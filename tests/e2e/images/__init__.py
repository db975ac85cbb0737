"""Images through vLLM engines and through a whole mesh of them, against plain vLLM."""
