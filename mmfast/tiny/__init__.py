"""Embedded models: data generators, training recipes, evaluation."""
