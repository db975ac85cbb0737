"""Groups: the loop that makes them what they shall be, and what it reads and writes."""
