"""Audio codecs: sound to codes and back, whole or in pieces of any size, with the same result."""
