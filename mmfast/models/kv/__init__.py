"""KV policies on an attached model: eviction, packing and retrieval."""
