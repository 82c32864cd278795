"""Models that a reward runs in this process: their arguments `dtype`, `device` and `batch_size`, and their weights."""

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowgrpo import hub
from flowgrpo.device import DTYPES, default_device
from flowgrpo.errors import UserError
from flowgrpo.rewards.about import lazy

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # a hub id


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """Reward whose model runs in this process; a subclass loads it (`_load`) and calls it.

    dtype: fp32, bf16 or fp16, of the weights and their products; a small head on top stays in fp32.
    device: such as "cuda:1" or "cpu"; None for the GPU of this process, or the CPU without one.
    batch_size: samples that go through the model at once.
    parts: what `_load` returns, ready-made; filled at the first use.
    parameters: number of weights of the default checkpoint, None where there is none. reward: name in error messages.
    differentiable: its scores have a gradient by the images, the weights never have one.
    Raises UserError for an unknown dtype, an absent device and a batch_size below 1.
    """

    dtype: str = "fp32"
    device: str | None = None
    batch_size: int = 32
    parts: Any = field(default=None, repr=False)
    reward: ClassVar[str]
    parameters: ClassVar[float | None] = None
    differentiable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_arguments(self.reward, self.dtype, self.device, self.batch_size)
        vars(self)["device"] = self.device or default_device()
        if self.parts is not None or not lazy.get():
            self.models

    @property
    def float_type(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @cached_property
    def models(self) -> tuple[Any, ...]:
        """Model with its tokenizer and the like, on the device; loaded at the first call."""
        parts = self.parts if self.parts is not None else self._load()
        self._require(parts)
        ready = vars(self)["parts"] = tuple(map(self._prepare, parts))
        return ready

    def _load(self) -> tuple[Any, ...]:
        """Load the model and what else the reward needs. Raises UserError if it is unavailable."""
        raise NotImplementedError

    def _require(self, parts: tuple[Any, ...]) -> None:
        """Raise UserError for a model that the reward cannot use."""

    def _prepare(self, part: Any) -> Any:
        """A part; a network in evaluation mode, on the device and in `dtype`.

        One that was loaded in `dtype` keeps what its library holds in fp32, such as the frequencies of positions.
        """
        if not isinstance(part, nn.Module):
            return part
        part = part.eval().requires_grad_(False).to(self.device)
        loaded = next((weight.dtype for weight in part.parameters()), None)
        return part if isinstance(part, Head) or loaded == self.float_type else part.to(self.float_type)

    def score_batches(self, scores: Callable[..., Tensor], images: Tensor | Sequence[str], prompts: Sequence[str],
                      *further: Tensor) -> Tensor:
        """`scores` of B images, or texts, with their prompts and rows of `further`, `batch_size` at a time -> [B]
        float32 on the CPU, in the images' graph."""
        batches = [slice(at, at + self.batch_size) for at in range(0, len(prompts), self.batch_size)]
        with torch.set_grad_enabled(torch.is_grad_enabled() and getattr(images, "requires_grad", False)):
            return torch.cat([scores(images[rows], list(prompts[rows]), *(held[rows] for held in further)).float().cpu()
                              for rows in batches])


class ImageModel(LocalModel):
    """Model that scores images with their prompts; a subclass scores a batch of them."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.score_batches(self._scores, images, prompts)

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Scores [B] of images [B, 3, H, W] in [0, 1]."""
        raise NotImplementedError


class Head(nn.Sequential):
    """Small network on a model's embedding, which stays in fp32."""


def require_arguments(reward: str, dtype: str, device: str | None, batch_size: int) -> None:
    """Raise UserError for an unknown dtype, an absent device and a batch_size below 1."""
    if dtype not in DTYPES:
        raise UserError(f"reward {reward!r}: dtype is {dtype!r}, expected {', '.join(DTYPES)}: take one of these, or "
                        "leave it out")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(f"reward {reward!r}: batch_size is {batch_size!r}, expected a number from 1: lower it where "
                        "memory runs out")
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, TypeError):
            raise UserError(f"reward {reward!r}: device is {device!r}, expected {', '.join(devices())}: take one of "
                            "these, or leave it out") from None


def model_arguments(reward: str, dtype: str | None, device: str | None, batch_size: int | None) -> dict[str, Any]:
    """Common arguments for a reward's models, without those that are None. Raises UserError as `require_arguments`."""
    require_arguments(reward, dtype or "fp32", device, 1 if batch_size is None else batch_size)
    named: dict[str, Any] = {"dtype": dtype, "device": device, "batch_size": batch_size}
    return {name: value for name, value in named.items() if value is not None}


def devices() -> list[str]:
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [*gpus, *["mps"] * torch.backends.mps.is_available(), "cpu"]


@contextmanager
def loading(what: str, fix: str, source: str = ".") -> Iterator[None]:
    """Context manager for loading weights: any error becomes a UserError with the object, the reason and the fix.

    source: their name on the hub, or a local path. A hub that does not answer is not asked again and again.
    """
    try:
        hub.read_cache_alone(source)
        yield
    except UserError:
        raise
    except Exception as error:  # a hub, a file and a library fail in many ways
        reason = hub.offline_reason(error) or textwrap.shorten(str(error), 160, placeholder=" ...")
        raise UserError(f"{what} cannot be loaded ({reason}): {fix}") from None


def load_pretrained(reward: str, kind: Any, name: str, revision: str | None, option: str, within: str = "",
               beside: str | None = None, **more: Any) -> Any:
    """Load a model or tokenizer of transformers from a folder or the hub, without running code from there.

    option: the reward's argument that names it, inside the argument `within` if given. beside: a second repository that
    the reward needs, for the message. Raises UserError, which names `option`, if it is unavailable.
    """
    given = f"{{{within}: {{{option}: FOLDER}}}}" if within else f"{{{option}: FOLDER}}"
    wanted = [each for each in (name, beside) if each and REPOSITORY.fullmatch(each)] \
        if REPOSITORY.fullmatch(name) else []
    fetch = " and ".join(f"`hf download {each}`" for each in wanted) or "fetch it"
    with loading(f"reward {reward!r}: {name}", f"{fetch} and give its folder as args: {given}", name):
        return kind.from_pretrained(name, revision=revision, trust_remote_code=False, **more)


def load_parts(it: Any, *kinds: str, within: str = "", **more: Any) -> tuple[Any, ...]:
    """Load a reward's `model`, a folder or hub id, by classes of transformers: its network, tokenizer and the like.

    it: the reward, which may have a `revision`. within: as of `load_pretrained`. more: arguments for the network, the
    first. Raises UserError as `load_pretrained` does.
    """
    import transformers

    def load(kind: str, **more: Any) -> Any:
        return load_pretrained(it.reward, getattr(transformers, kind), it.model, getattr(it, "revision", None), "model",
                               within, **more)

    return load(kinds[0], **more), *map(load, kinds[1:])


def tensors(reward: str, where: str, revision: str | None, option: str) -> dict[str, Tensor]:
    """Load the tensors of a checkpoint: a file, or `owner/name/file` on the hub. Nothing else is unpickled.
    Raises UserError, which names `option`, the reward's argument for it, if it is unavailable."""
    owner, _, file = where.rpartition("/")
    fetch = f"`hf download {owner} {file}`" if REPOSITORY.fullmatch(owner) and not Path(owner).exists() else "fetch it"
    with loading(f"reward {reward!r}: {where}", f"{fetch} and give its path as args: {{{option}: FILE}}", where):
        path = Path(where) if Path(where).is_file() else from_hub(where, revision)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        return checkpoint.get("state_dict", checkpoint)


def from_hub(where: str, revision: str | None) -> Path:
    """Local path of the hub's file OWNER/NAME/FILE. Raises FileNotFoundError for another form."""
    if where.count("/") < 2 or where.startswith(("/", ".", "~")):
        raise FileNotFoundError("no such file")
    from huggingface_hub import hf_hub_download

    owner, name, file = where.split("/", 2)
    return Path(hf_hub_download(f"{owner}/{name}", file, revision=revision))


def fill(reward: str, network: torch.nn.Module, state: dict[str, Tensor], where: str) -> None:
    """Load every tensor of a network. Raises UserError for a checkpoint of another network."""
    with loading(f"reward {reward!r}: {where}", "give the checkpoint that was made for this reward"):
        network.load_state_dict(state)
