"""Decoders that mmfast runs itself: the backbone, streams and rotary positions."""
