"""What the tiny video pipelines share."""

from __future__ import annotations

SIZE = {"height": 16, "width": 16, "num_frames": 5}
TOKENS = 16


def t5(kind: str = "T5", vocabulary: int = 514):
    """A T5 or UMT5 encoder of width 16."""
    import transformers

    config = getattr(transformers, f"{kind}Config")
    return getattr(transformers, f"{kind}EncoderModel")(config(
        vocab_size=vocabulary, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0))


def picture(shade: int = 64):
    """A PIL picture of 16 x 16: what an image-to-video call starts from."""
    from PIL import Image

    return Image.linear_gradient("L").resize((16, 16)).point(lambda value: (value + shade) % 256).convert("RGB")


def ready(pipe):
    """The pipeline without progress bars."""
    pipe.set_progress_bar_config(disable=True)
    return pipe


def llama_config():
    """Of a Llama whose third last hidden states, which HunyuanVideo reads, are those after its first layer."""
    from transformers import LlamaConfig

    return LlamaConfig(vocab_size=514, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
                       pad_token_id=0)
