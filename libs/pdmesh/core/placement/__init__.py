"""Where a request may go, best first, from the picture of all instances that is kept here."""
