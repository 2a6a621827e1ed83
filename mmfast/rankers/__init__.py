"""Learned rankings of the tokens inside a model, one method a file; importing registers them."""
