"""Who may come in, and how much each tenant may take."""
