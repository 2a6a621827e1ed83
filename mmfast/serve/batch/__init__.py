"""Answering a folder of media, resumable, on Ray."""
