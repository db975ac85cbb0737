"""The endpoint picker: tells a proxy which gateway takes a request, by the mesh's placement."""
