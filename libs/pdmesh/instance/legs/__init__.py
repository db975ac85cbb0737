"""The legs of an instance: from a gateway's command to its last token."""
