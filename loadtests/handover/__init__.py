"""What handing a prompt's KV from prefill to decode costs a client on vLLM, beside one engine that
keeps it and beside vLLM's own NixlConnector.
"""
