"""Reducers made for cuts inside the language model."""
