"""Engines: what answers requests, in this process, in others, or on a cluster."""
