"""The server: HTTP, WebSocket, scheduler and engines; needs `pip install "mmfast[serve]"`."""
