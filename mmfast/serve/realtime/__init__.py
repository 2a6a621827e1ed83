"""The OpenAI Realtime protocol over a WebSocket: voice, and live video beside it."""
