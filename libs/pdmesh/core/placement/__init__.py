"""Where a request may go, best first, judged by a picture of all instances that is kept here."""
