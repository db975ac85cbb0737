"""The mesh's HTTP servers: uvicorn with bounds on everything that a client may send."""
