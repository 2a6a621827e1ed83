"""KV-cache policies that weigh attention by what it does, or by what is to come."""
