"""Live sources: pushed frames, folders, devices and network streams."""
