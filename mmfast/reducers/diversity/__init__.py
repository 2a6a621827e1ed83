"""Reducers that keep a diverse set of tokens."""
