"""Every file in `examples/` and every block of the README runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import wave
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.pictor_things import NAMES, nearest
from tests.servers import ROOT, Server, command, free_port

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(*args: str, cwd: Path = ROOT) -> str:
    """A command's output; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        args, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def seconds(path: Path) -> float:
    """Duration of a WAV file."""
    with wave.open(str(path)) as file:
        return file.getnframes() / file.getframerate()


def test_http_client(speech_server: Server, tmp_path: Path) -> None:
    output = tmp_path / "hello.wav"
    run(sys.executable, "examples/http_client.py", "--url", speech_server.url, "--output", str(output))
    assert 1.0 < seconds(output) < 10.0


def test_stream_to_file(speech_server: Server, tmp_path: Path) -> None:
    output = tmp_path / "story.wav"
    run(sys.executable, "examples/stream_to_file.py", "--url", speech_server.url, "--output", str(output))
    assert 5.0 < seconds(output) < 30.0


def test_draw_with_previews(speech_server: Server, tmp_path: Path) -> None:
    run(
        sys.executable,
        "examples/draw_with_previews.py",
        *("--url", speech_server.url, "--prompt", "rocket", "--output-dir", str(tmp_path)),
    )
    names = ["picture", "preview0", "preview1", "preview2"]
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == names
    picture = np.asarray(Image.open(tmp_path / "picture.png"))
    assert NAMES[nearest([picture])[0]] == "rocket"


def test_websocket_typing(speech_server: Server, tmp_path: Path) -> None:
    output = tmp_path / "typed.wav"
    url = ("--url", speech_server.ws_url, "--seconds-per-word", "0.05")
    run(sys.executable, "examples/websocket_typing.py", *url, "--output", str(output))
    assert 3.0 < seconds(output) < 20.0


def test_embed_asyncio(tmp_path: Path) -> None:
    run(sys.executable, "examples/embed_asyncio.py", "--output-dir", str(tmp_path))
    assert sorted(path.stem for path in tmp_path.glob("*.wav")) == ["heart", "nova", "onyx"]


@pytest.mark.parametrize(("app", "prefix"), [("mount_starlette", "/omni"), ("uvicorn_app", "")])
def test_apps_run_under_plain_uvicorn(app: str, prefix: str) -> None:
    port = free_port()
    args = ("-m", "uvicorn", f"examples.{app}:app", "--port", str(port), "--log-level", "warning")
    with command(*args, port=port, ready=f"{prefix}/health/ready") as server:
        answer = httpx.post(f"{server.url}{prefix}/v1/audio/speech", json={"input": "Hello."}, timeout=30)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "audio/wav"


@pytest.mark.parametrize("block", [code for kind, code in BLOCKS if kind in ("sh", "python")])
def test_readme_blocks_run(speech_server: Server, tmp_path: Path, block: str) -> None:
    code = block.replace("http://127.0.0.1:8091", speech_server.url)
    if block.startswith(("curl", "omni-async")):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        run("bash", "-ec", f"export PATH={path}\n{code}".replace("curl ", "curl -sSf "), cwd=tmp_path)
    else:
        run(sys.executable, "-c", code, cwd=tmp_path)


@pytest.mark.parametrize("block", [code for kind, code in BLOCKS if kind == "yaml"])
def test_readme_deployments_are_valid(tmp_path: Path, block: str) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text(block)
    run(sys.executable, "-m", "omni_async", "check", "--deploy-config", str(path))
