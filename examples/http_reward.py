"""A small scoring API, as of a company, and the recipe that trains on it: http_reward.yaml.

    export BRAND_KEY=secret-of-the-demo
    python examples/http_reward.py 8900 &
    flowgrpo train examples/http_reward.yaml

The API takes {"input": {"text": ..., "image": base64 PNG}} with a bearer token and answers {"result": {"scores": [N]}}:
how red the image is, in [0, 1].
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image


class Api(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {os.environ['BRAND_KEY']}":
            self.answer(401, {"error": "unknown key"})
            return
        image = Image.open(io.BytesIO(base64.b64decode(request["input"]["image"]))).convert("RGB")
        self.answer(200, {"result": {"scores": [float(np.asarray(image)[..., 0].mean()) / 255]}})

    def answer(self, status: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Api).serve_forever()
