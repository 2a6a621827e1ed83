"""Options of the server: where they come from, what is refused, what is printed."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import signal
import socket
import sys
from concurrent.futures import Future
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from mmfast.core.errors import MmfastError
from mmfast.serve.config import ServerConfig, helps, resolve, types_of

ROOT = Path(__file__).resolve().parents[3]


def test_flags_beat_the_environment_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'port = 1\nslots = 2\nidle-seconds = 7\nremote_hosts = ["a.org"]\ndemo = false\n',
        encoding="utf-8-sig",  # of Windows' editors
    )
    environ = {
        "MMFAST_SLOTS": "3",
        "MMFAST_QUEUE": "5",
        "MMFAST_API_KEY": "one, two",
        "MMFAST_DEMO": "yes",
    }
    found = resolve({"queue": 6, "model": None}, file, environ)
    assert (found.port, found.slots, found.queue, found.idle_seconds) == (1, 3, 6, 7.0)
    assert found.remote_hosts == ("a.org",) and found.api_keys == ("one", "two") and found.demo
    assert resolve({}, None, {"MMFAST_CONFIG": str(file)}).port == 1
    assert resolve({}, None, {}) == ServerConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "did you mean 'port'"),
        ("port = true", "whole number"),
        ('port = "8"', "whole number"),
        ("api_keys = [1]", "texts"),
        ("port = ", "no TOML"),
        ("port = 99999", "port=99999"),
        ("slots = 0", "slots=0"),
        ('engine = "rai"', "did you mean 'ray'"),
        ('log_level = "loud"', "unknown log level"),
        ('api_keys = [""]', "API key is empty"),
    ],
)
def test_wrong_files_say_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(MmfastError, match=re.escape(message)) as caught:
        resolve({}, file, {})
    assert "\n" not in str(caught.value)


def test_wrong_environment_and_missing_file() -> None:
    for name, value in (("PORT", "9x"), ("DEMO", "perhaps"), ("IDLE_SECONDS", "long")):
        with pytest.raises(MmfastError, match=f"MMFAST_{name}="):
            resolve({}, None, {f"MMFAST_{name}": value})
    with pytest.raises(MmfastError, match="cannot be read"):
        resolve({}, "nowhere.toml", {})


def test_every_option_is_explained_and_has_a_plain_type() -> None:
    names = [each.name for each in fields(ServerConfig)]
    assert list(helps()) == names  # in the docstring's order: one line each, none forgotten
    assert set(types_of().values()) <= {str, int, float, bool, tuple}
    with pytest.raises(FrozenInstanceError):
        ServerConfig().port = 1  # type: ignore[misc]


def test_keys_are_never_shown() -> None:
    config = ServerConfig(api_keys=("sk-very-secret",))
    assert "secret" not in repr(config) and "secret" not in json.dumps(config.public())


def cli(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    from mmfast.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["serve", *args])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_dry_run_prints_every_option_and_no_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMFAST_PORT", "81")
    code, out, _ = cli(capsys, "--dry-run", "--json", "--api-key", "sk-secret", "--no-demo")
    found = json.loads(out)
    assert code == 0 and set(found) == {each.name for each in fields(ServerConfig)}
    assert found["port"] == 81 and found["demo"] is False and "secret" not in out


def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for args, message in (
            (["--port", port], "cannot listen"),
            (["--host", "not a host"], "cannot listen"),
            (["--port", "99999"], "port=99999"),
            (["--reduce", "evz:0.5"], "did you mean 'evs'"),
            (["--cache", "snapkw:64"], "did you mean 'snapkv'"),
            (["--engine", "rai"], "did you mean 'ray'"),
            (["--engine", "processes"], "choices: inproc, ray"),
            (["--replicas", "2"], "replicas=2 needs the engine ray"),
            (["--replicas", "2"], 'pip install "mmfast[ray]"'),
            (["--decode-replicas", "3"], "decode_replicas=3 needs the engine ray"),
            (["--replicas", "0"], "replicas=0"),
            (
                ["--engine", "ray", "--replicas", "2", "--encode-replicas", "2"],
                "not possible with replicas=2",
            ),
            (["--reduce", "auto?check=2", "--dry-run"], "share in (0, 1]"),
            (["--reduce", "auto", "--engine", "ray"], "or take --engine inproc"),
            (
                ["--reduce", "auto?check=1", "--cache", "snapkv:0.5", "--dry-run"],
                "leave out cache=",
            ),
            (["--engine", "ray", "--reduce", "lazyllm:0.5"], "start the server with --replicas"),
            (["--engine", "ray", "--cache", "snapkv:0.5", "--dry-run"], "cache 'snapkv:0.5'"),
            (["--model", "./nowhere"], "./nowhere"),
            (["--reuse", "all"], "choices: blend, craft, encoder, kvcomm, prefix"),
            (["--reuse", "prefix", "--engine", "ray"], "give --engine inproc"),
            (["--reuse", "prefix", "--cache", "snapkv:64"], "cache policy"),
            (["--reuse", "prefix", "--prefill", "minference:0.3"], "leave prefill out"),
            (["--reuse", "prefix", "--reuse-memory", "much"], "'much'"),
            (["--reuse-folder", "."], "give --reuse prefix"),
            (["--modules", "x.json"], "give --reuse prefix"),
        ):
            code, out, err = cli(capsys, *args)
            assert code == 2 and message in err and not out, (args, err)
            assert len(err.strip().splitlines()) == 1, err


def test_both_signals_stop_a_server_and_are_not_raised_again() -> None:
    pytest.importorskip("uvicorn")
    from mmfast.serve.http.run import Server

    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    for number in (signal.SIGINT, signal.SIGTERM):
        server = Server(lambda *_: None, ServerConfig())  # type: ignore[arg-type]
        with server.capture_signals():
            signal.raise_signal(number)
        assert server.should_exit
    assert before == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]


def test_signals_are_the_servers_own_before_its_engine_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray puts back the handlers that it finds at its start, so they must be there by then."""
    pytest.importorskip("uvicorn")
    applications = pytest.importorskip("starlette.applications")
    from mmfast.serve.http import app, run

    found: list[Any] = []

    class BrokenService:
        def start(self) -> Future[Any]:
            found.extend(signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM))
            future: Future[Any] = Future()
            future.set_exception(MmfastError("it cannot be loaded"))
            return future

        def failure(self) -> MmfastError:
            return MmfastError("it cannot be loaded")

    empty = applications.Starlette()
    empty.state.service = BrokenService()
    monkeypatch.setattr(app, "create_app", lambda _: empty)
    config = ServerConfig(port=0)
    with pytest.raises(MmfastError, match="it cannot be loaded"):
        run.serve(config, run.bind(config.host, config.port), lambda: None)
    assert [each.__name__ for each in found] == ["handle_exit"] * 2


@pytest.mark.slow
def test_it_starts_answers_and_stops() -> None:
    pytest.importorskip("fastapi")
    import httpx
    from serve_tools import serving

    with serving() as (process, url):
        document: dict[str, Any] = {
            "model": "mmfast-tiny-scenes",
            "messages": [{"role": "user", "content": "Hello?"}],
        }
        reply = httpx.post(f"{url}/v1/chat/completions", json=document, timeout=120)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read() if process.stderr else ""
        code = process.wait(60)
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] > 0
    assert code == 0 and "Traceback" not in rest and "stopped" in rest


def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "mmfast.serve.http.run", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = cli(capsys, "--port", "0")
    assert code == 2 and 'pip install "mmfast[serve]"' in err and "uvicorn" in err


def test_without_ray_the_extra_is_named_and_nothing_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for args in ([], ["--replicas", "2"], ["--decode-replicas", "2"]):
        code, out, err = cli(capsys, "--engine", "ray", "--port", "0", *args)
        assert (code, out) == (2, "") and 'pip install "mmfast[ray]"' in err
        assert len(err.strip().splitlines()) == 1 and "listening" not in err


@pytest.mark.parametrize(
    ("engine", "module", "name"),
    [
        ("inproc", "mmfast.serve.engine.scheduler", "Scheduler"),
        ("ray", "mmfast.serve.ray.engine", "RayEngine"),
    ],
)
def test_every_engine_gets_its_options(
    engine: str, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmfast.serve.http.service import load_engine

    if engine == "ray":
        pytest.importorskip("ray")
    home = importlib.import_module(module)
    signature = inspect.signature(getattr(home, name))
    monkeypatch.setattr(home, name, signature.bind)  # what it does not take raises
    config = ServerConfig(
        engine=engine,
        model="org/some",
        reduce="evs:0.5",
        slots=3,
        queue=4,
        decode="recycle",
        decode_replicas=2 if engine == "ray" else 1,
    )
    found: Any = load_engine(config)
    given = {**found.arguments, **found.arguments.get("given", {})}
    assert given["model"] == "org/some" and given["name"] == "org/some"
    assert (given["reduce"], given["slots"], given["queue"]) == ("evs:0.5", 3, 4)
    if engine == "ray":  # where `decode` counts the processes that decode
        assert (given["decode"], given["decode_spec"]) == (2, "recycle")
        assert given["address"] == "local"
    else:
        assert given["decode"] == "recycle"
