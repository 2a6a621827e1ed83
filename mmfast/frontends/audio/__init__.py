"""Sound: files, samples, voice activity and turns."""
