"""`turbospark serve`: where it listens, what it refuses, how it ends."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest
import tiny_models

from turbospark.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.talking(tmp_path_factory.mktemp("serve") / "tiny.gturbo")


def test_it_serves_until_it_is_interrupted(model: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    words = ["serve", str(model), "--port", "0", "--api-key-file", str(key), "--max-context", "256"]
    process = subprocess.Popen(
        [sys.executable, "-m", "turbospark", *words], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.match(r"turbospark: tiny at (http://127\.0\.0\.1:\d+/v1); Ctrl-C ends", line)
        assert found, line
        client = openai.OpenAI(base_url=found[1], api_key="secret")
        hello = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(model="tiny", messages=hello, max_tokens=3)
        assert answer.usage.completion_tokens <= 3
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(20)
    assert code in (0, 130)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines; give --api-key-file"),
        (["--queue", "-1"], "--queue -1 is not valid"),
        (["--port", "99999"], "cannot listen on 127.0.0.1 port 99999"),
        (["--temperature", "-1"], "--temperature -1 is not valid"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    words: list[str], match: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(model), *words]) == 2
    assert match in capsys.readouterr().err


def test_a_taken_port_and_an_empty_key_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(model), "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}: " in capsys.readouterr().err
    (tmp_path / "key").write_text(" \n")
    assert main(["serve", str(model), "--api-key-file", str(tmp_path / "key")]) == 2
    assert "is empty; write the API key into it" in capsys.readouterr().err


def test_without_the_extra_one_line_names_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(model)]) == 1
    assert "serve needs uvicorn; pip install 'turbospark[server]'" in capsys.readouterr().err
