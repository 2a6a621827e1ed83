"""Learned compressors: trained modules between projector and language model, one file each."""
