"""Clips: readers, containers, sampling and parallel decoding."""
