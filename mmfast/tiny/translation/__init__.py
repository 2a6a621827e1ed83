"""Embedded model of translation: a synchronous grammar of two languages, and its training."""
