"""Multi-token audio heads: `core.registry` finds every file of this package by itself."""
