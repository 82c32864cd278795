"""Judges against llama.cpp's server with a tiny random model: `make test-all` runs this where it is installed."""

from collections.abc import Iterator

import gguf
import numpy as np
import pytest

from tests.servers.test_judges import TEXTS, serving, try_judges


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory) -> Iterator[str]:
    """The URL of llama.cpp's server with a random model of one layer, whose tokens are bytes."""
    width, hidden, words = 32, 64, [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    folder, rng = tmp_path_factory.mktemp("gguf"), np.random.default_rng(0)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // 2)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * 256)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    shapes = {"attn_q": (width, width), "attn_k": (width, width), "attn_v": (width, width),
              "attn_output": (width, width), "ffn_gate": (hidden, width), "ffn_up": (hidden, width),
              "ffn_down": (width, hidden)}
    outer = {"token_embd": (len(words), width), "output": (len(words), width)}
    for name, shape in (outer | {f"blk.0.{name}": shape for name, shape in shapes.items()}).items():
        writer.add_tensor(f"{name}.weight", rng.normal(0, 0.1, shape).astype(np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with serving(folder, "-m", "llama_cpp.server", "--model", str(folder / "model.gguf"), "--host", "127.0.0.1",
                 "--port", "PORT", "--n_ctx", "8192", "--n_threads", "1") as url:
        yield url


@pytest.mark.parametrize("name", TEXTS)
def test_llama_cpp_takes_a_judge_of_texts(name, llama_cpp):
    assert try_judges.asked(name, llama_cpp, None).startswith("works")
