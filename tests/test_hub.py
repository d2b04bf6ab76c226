"""Models by their id on the Hugging Face hub, from a hub of our own that speaks its protocol."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FETCH = """
import sys
from tasks.storage import fetch_model
try:
    print(fetch_model(sys.argv[1], sys.argv[2] or None))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def hub(tiny_model, monkeypatch, tmp_path):
    """Serves the tiny model as `house/tiny`, revisions main and v1, with files nobody needs beside it."""
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir()} | {
        "pytorch_model.bin": b"unwanted",
        "original/consolidated.safetensors": b"unwanted",
    }
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def answer(self, status, content=b"", **headers):
            self.send_response(status)
            for name, value in ({"Content-Length": len(content)} | headers).items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def do_GET(self):
            asked.append(self.path)
            if "/house/gated" in self.path:
                self.answer(403, X_Error_Code="GatedRepo")
            elif "/house/tiny" not in self.path:
                self.answer(404, X_Error_Code="RepoNotFound")
            elif not any(part in self.path for part in ("/main", "/v1", COMMIT)):
                self.answer(404, X_Error_Code="RevisionNotFound")
            elif "/tree/" in self.path:
                oid = {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}
                tree = [{"type": "file", "path": name, "size": len(files[name]), "oid": oid[name]} for name in files]
                self.answer(200, json.dumps(tree).encode())
            elif self.path.startswith("/api/models/"):
                listing = [{"rfilename": name} for name in files]
                self.answer(200, json.dumps({"id": "house/tiny", "sha": COMMIT, "siblings": listing}).encode())
            else:
                content = files[self.path.split("/", 5)[5]]
                etag = f'"{hashlib.sha1(content).hexdigest()}"'
                self.answer(200, content, ETag=etag, X_Repo_Commit=COMMIT)

        def do_HEAD(self):
            self.do_GET()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield asked
    server.shutdown()


def fetched(name, revision=""):
    """In a process of its own, since the hub's client reads its variables once."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    ran = subprocess.run(
        [sys.executable, "-c", FETCH, name, revision], env=environment, capture_output=True, text=True, timeout=60
    )
    return ran.stdout.strip() or ran.stderr


@pytest.mark.parametrize("revision", ["", "v1"])
def test_a_model_is_fetched_by_its_id_without_what_nobody_needs(hub, tiny_model, revision):
    directory = Path(fetched("house/tiny", revision))
    found = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert found == {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    assert any(f"/{revision or 'main'}" in path for path in hub)


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("house/absent", "", "ConfigError house/absent: there is no such directory here, and no such model on the hub"),
        ("house/tiny", "v9", "has no revision 'v9'"),
        ("house/gated", "", "its terms must be accepted"),
    ],
)
def test_what_the_hub_refuses_is_said(hub, name, revision, message):
    assert message in fetched(name, revision)


def test_a_hub_out_of_reach_can_be_tried_again(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetched("house/tiny").startswith("RecoverableError house/tiny: there is no such directory here, and the hub")
