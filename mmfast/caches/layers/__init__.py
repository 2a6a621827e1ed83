"""KV-cache policies whose layers keep unlike numbers of tokens."""
