"""Media front-ends: files, bytes, arrays and streams in, upright RGB frames or mono sound out."""
