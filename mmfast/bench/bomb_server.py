"""The real server with an engine without a model, in a process of its own, and a small internet.

`python -m mmfast.bench.bomb_server PORT OPTIONS`: names of `.example` lead to PORT of this
machine, under addresses that they only pretend to have.
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
# What a name's addresses are, the first time and ever after.
NAMES = {
    "good.example": ([PUBLIC], [PUBLIC]),
    "inside.example": (["10.0.0.1"], ["10.0.0.1"]),
    "half.example": ([PUBLIC, "127.0.0.1"], [PUBLIC, "127.0.0.1"]),
    "rebind.example": ([PUBLIC], ["127.0.0.1"]),
}


def network(port: int) -> fetch.Network:
    """Names and connections of the small internet."""
    asked: Counter[str] = Counter()

    async def resolve(host: str, _: int) -> list[str]:
        asked[host] += 1
        return NAMES[host][asked[host] > 1] if host in NAMES else [host]

    async def connect(*_: object) -> Any:  # also to addresses inside: a guard that fails shows
        return await asyncio.open_connection("127.0.0.1", port)

    return fetch.Network(resolve, connect)


def main() -> None:
    """Serve until killed; the port is the first line of what is printed."""
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
