"""Reducers that use the time axis of a video."""
