"""Visual-token reducers: `core.registry` finds every file of this package by itself."""
