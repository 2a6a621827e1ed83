"""Embedded model of text: retrieval from long documents, in the manner of RULER."""
