"""Judges against `transformers serve` with a tiny random model: `make test-all` runs this where it is installed."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import try_judges

from flowgrpo.errors import UserError
from flowgrpo.rewards import find
from flowgrpo.tools.check.tiny.parts import chat_tokenizer

LONGEST = 600.0  # seconds in which a server answers, on a busy machine too
TEXTS = [name for name, (kind, _) in try_judges.REWARDS.items() if kind == "text"]


@contextmanager
def serving(folder: Path, *command: str) -> Iterator[str]:
    """Context manager: the URL of a server's API. command: with PORT in the place of its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen([sys.executable, *(port if word == "PORT" else word for word in command)], stdout=log,
                                  stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    began, url = time.monotonic(), f"http://127.0.0.1:{port}/v1"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/models", timeout=5).read()
                break
            except OSError:
                ended = server.poll() is not None or time.monotonic() - began > LONGEST
                assert not ended, (folder / "server.log").read_text()[-3000:]
                time.sleep(0.3)
        yield url
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Folder of a tiny random language model that reads any text, with a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM
    folder, tokens = tmp_path_factory.mktemp("model"), chat_tokenizer()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8192, pad_token_id=tokens.pad_token_id, bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id)).save_pretrained(folder)
    tokens.model_max_length = 8192
    tokens.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def transformers_serve(model) -> Iterator[str]:
    start = "from transformers.cli.transformers import main; main()"
    with serving(model, "-c", start, "serve", "--host", "127.0.0.1", "--port", "PORT", str(model)) as url:
        yield url


@pytest.mark.parametrize("name", TEXTS)
def test_transformers_serve_takes_a_judge_of_texts(name, model, transformers_serve):
    assert try_judges.asked(name, transformers_serve, str(model)).startswith("works")


def test_transformers_serve_takes_every_key_of_a_question(model, transformers_serve, capsys):
    """What it refuses by name is left out, once."""
    kind, arguments = try_judges.REWARDS["text_judge"]
    reward = find("text_judge", arguments | {"url": transformers_serve, "model": str(model), "max_tokens": 4})
    assert len(reward(["a", "b"], ["p", "q"], [{}, {}])) == 2
    assert "a judge: " not in capsys.readouterr().err


def test_an_unknown_model_ends_a_run_with_the_servers_words(transformers_serve):
    reward = find("text_judge", {"url": transformers_serve, "model": "no/such-model", "retries": 0})
    with try_judges.brief(), pytest.raises(UserError, match="a judge: http.* answered 4"):
        reward(["a"], ["p"], [{}])
