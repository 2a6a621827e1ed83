"""The dialogue engine: turns, replies, playback and history."""
