"""The referee of methods: measured cells, tests between methods, one JSON document, one page."""
