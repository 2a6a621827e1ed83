"""Decoding of untrusted media in confined processes."""
