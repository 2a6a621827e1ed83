"""The guard of the server: keys, limits, untrusted media, logs."""
