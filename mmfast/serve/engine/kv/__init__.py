"""Keys and values that running answers hold: rows in tensors that decoding steps share."""
