"""Blocks that have left the window of a stream: tiers, files and search."""
