"""KV policies that choose anew at every decode step what is read."""
