"""Benchmarks, one module for each subject; `mmfast.bench.registry` lists them."""
