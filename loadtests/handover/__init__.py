"""What the hand-over of a prompt's KV costs a client on vLLM, compared with one engine that keeps
its KV and with vLLM's own NixlConnector.
"""
