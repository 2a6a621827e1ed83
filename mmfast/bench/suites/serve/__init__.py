"""Benchmarks of the server."""
