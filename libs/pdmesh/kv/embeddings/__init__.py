"""The names of image embeddings, and an encoder's pool from which prefills fetch embeddings."""
