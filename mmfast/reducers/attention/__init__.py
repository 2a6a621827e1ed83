"""Reducers that rank tokens by attention or keys."""
