"""A hub on this machine: folders served over the few addresses that huggingface-hub asks for.

`refuse[repo] = (status, code, message)` makes it answer as the real one does for a repository that
is gated, missing, or asked for with a bad token. `requests` is what was asked.
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHA = "a" * 40


class FakeHub:
    def __init__(self):
        self.folders: dict[str, Path] = {}
        self.refuse: dict[str, tuple[int, str, str]] = {}
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request) -> None:
        self.requests.append(f"{request.command} {request.path}")
        repo = re.match(r"/(?:api/models/)?([^/]+/[^/?]+)", request.path)[1]
        if repo not in self.folders:
            status, code, message = self.refuse.get(repo, (404, "RepoNotFound", "Repository not found"))
            return send(request, b"{}", status, {"X-Error-Code": code, "X-Error-Message": message})
        if "/revision/" in request.path and request.path.rpartition("/")[2] not in ("main", SHA):
            return send(request, b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        folder = self.folders[repo]
        if "/resolve/" in request.path:
            return send(request, (folder / request.path.split("/", 5)[5]).read_bytes())
        tree = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": p.name} for p in folder.iterdir()]
        if "/tree/" in request.path:
            return send(request, json.dumps(tree).encode())
        info = {"id": repo, "sha": SHA, "siblings": [{"rfilename": f["path"]} for f in tree]}
        send(request, json.dumps(info).encode())


def send(request, body: bytes, status: int = 200, headers: dict | None = None) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), "ETag": f'"{hash(body)}"', "X-Repo-Commit": SHA, **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
