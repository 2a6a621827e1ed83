"""Model families, one file each; a file calls `add_adapter`."""
