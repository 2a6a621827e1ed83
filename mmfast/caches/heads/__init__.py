"""KV-cache policies whose heads keep unlike numbers of tokens."""
