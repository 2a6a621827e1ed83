"""KV-cache policies that tell frames apart."""
