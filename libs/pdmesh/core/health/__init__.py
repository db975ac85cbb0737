"""Who is alive, and who is faulty at which level; how many may be taken out of service for it."""
