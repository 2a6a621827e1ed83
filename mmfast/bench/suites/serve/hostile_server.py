"""The real server with an engine without a model and a simulated internet, in its own process.

Connections to names of `.example` go to PORT of this machine, whatever their address.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import Any

from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import Echo
from mmfast.serve.guard import fetch
from mmfast.serve.guard.media import decoders
from mmfast.serve.http.app import create_app
from mmfast.serve.http.run import Server, bind

PUBLIC = "93.184.215.14"
# Addresses of a name, at the first resolution and at later ones.
NAMES = {
    "good.example": ([PUBLIC], [PUBLIC]),
    "inside.example": (["10.0.0.1"], ["10.0.0.1"]),
    "half.example": ([PUBLIC, "127.0.0.1"], [PUBLIC, "127.0.0.1"]),
    "rebind.example": ([PUBLIC], ["127.0.0.1"]),
}


def network(port: int) -> fetch.Network:
    """Return names and connections of the simulated internet."""
    asked: Counter[str] = Counter()

    async def resolve(host: str, _: int) -> list[str]:
        asked[host] += 1
        return NAMES[host][asked[host] > 1] if host in NAMES else [host]

    async def connect(*_: object) -> Any:
        # Also to private addresses, so that a failing guard shows.
        return await asyncio.open_connection("127.0.0.1", port)

    return fetch.Network(resolve, connect)


def main() -> None:
    """Serve until killed; print the port as the first line."""
    port, options = int(sys.argv[1]), json.loads(sys.argv[2])
    fetch.NETWORK = network(port)
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    config = ServerConfig(port=0, voice=False, demo=False, **options)
    decoders(config).warm()
    listening = bind(config.host, config.port)
    server = Server(create_app(config, executor=Echo()), config)
    print(listening.getsockname()[1], flush=True)
    server.run(sockets=[listening])


if __name__ == "__main__":
    main()
