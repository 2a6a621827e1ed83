"""Reducers that merge or pool tokens."""
