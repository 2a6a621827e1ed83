"""Endless video: sessions, bounded memory, sources and clocks."""
