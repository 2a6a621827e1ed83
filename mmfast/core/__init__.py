"""The currency of the toolkit: tokens, reductions, the registry, spec strings and the trace."""
