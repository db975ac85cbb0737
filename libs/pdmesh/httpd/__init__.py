"""HTTP servers of the mesh: uvicorn with bounds on everything that a client may send."""
