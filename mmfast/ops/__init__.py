"""One tensor operation per file, each with a torch reference; kernels are chosen inside."""
