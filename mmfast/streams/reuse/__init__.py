"""Media that are paid for once: encoder outputs, keys and values, found again by content."""
