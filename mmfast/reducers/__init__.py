"""Token reducers; `core.registry` imports every file of this package."""
