"""Talkers of transformers: one file a class, found by its registry."""
