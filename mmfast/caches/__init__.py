"""KV-cache policies: one per file, one import line each. None has landed yet."""
