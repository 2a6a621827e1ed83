"""The frame cache: towers that compute the changed patches of a stream's frames."""
