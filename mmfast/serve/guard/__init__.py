"""What stands between a request and the engine: keys, limits, hostile media, logs."""
