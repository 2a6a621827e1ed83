"""Reduction inside a stock model: sites, signals, sequences and masks."""
