"""The sim's encoder, and how a sim prefill awaits and checks the embeddings of its images."""
