"""Encode, prefill and decode as Ray deployments; needs `pip install "mmfast[ray]"`."""
