"""The simulated encoder, and how a simulated prefill awaits and checks the embeddings of images."""
