"""turbospark serve: an OpenAI-compatible server for one model.

Knows addresses, keys and what to print. Does not know requests.
"""

from __future__ import annotations

import ipaddress
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

from turbospark import GenerationOptions, OpenOptions, Runner
from turbospark.cli.console import note
from turbospark.cli.parser import opening, sampling
from turbospark.errors import MissingDependencyError, OptionError

SESSION_SLOTS = 4


def serve(args: Namespace) -> int:
    """turbospark serve MODEL"""
    try:
        import uvicorn

        from turbospark.server.app import make_app
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "starlette"):
            raise
        raise MissingDependencyError(
            f"serve needs {error.name}; pip install 'turbospark[server]'"
        ) from None
    key = _key(args)
    defaults = GenerationOptions(**sampling(args))
    if args.queue < 0:
        raise OptionError(f"--queue {args.queue} is not valid; works: an integer >= 0")
    listener = _listen(args.host, args.port)
    with listener, _open(args) as runner:
        name = args.served_name or runner.path.name.removesuffix(".gturbo")
        app = make_app(runner, name, api_key=key, queue_limit=args.queue, defaults=defaults)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        note(f"turbospark: {name} at http://{shown}:{port}/v1; Ctrl-C ends")
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _open(args: Namespace) -> Runner:
    slots = args.session_slots
    if slots is None:
        slots = 1 if args.no_prefix_reuse else SESSION_SLOTS
    changes: dict[str, Any] = {
        "prefix_reuse": not args.no_prefix_reuse,
        "session_slots": slots,
    }
    return Runner.open(args.model, OpenOptions.interactive(**opening(args), **changes))


def _key(args: Namespace) -> str | None:
    """The API key. It stands in a file: an argument could be read by every process."""
    if args.api_key_file is not None:
        key = Path(args.api_key_file).read_text("utf-8").strip()
        if not key:
            raise OptionError(f"{args.api_key_file} is empty; write the API key into it")
        return key
    if not _is_loopback(args.host):
        raise OptionError(
            f"--host {args.host} can be reached from other machines; give --api-key-file"
        )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    """A socket bound before the model is opened: a taken port is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise OptionError(f"cannot listen on {host} port {port}: {error}") from None
    return listener
