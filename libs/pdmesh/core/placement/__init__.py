"""Where a request may go, best first, by a picture of all instances that this room keeps."""
