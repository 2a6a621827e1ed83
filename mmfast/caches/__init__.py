"""KV-cache policies: `core.registry` finds every file of this package by itself."""
