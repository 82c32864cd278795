"""Answers of a pipeline's denoiser: the weights that draw a picture read it, and a head answers questions about it.

The denoiser gets the clean latents at one small time, without noise and under the empty prompt, which tells no answer.
The head reads the input of its last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.policies.pipelines.call import at_guidance
from flowgrpo.samplers.kernels import Euler
from flowgrpo.samplers.noised_finals import exploration, noised_states

if TYPE_CHECKING:
    from flowgrpo.policies.pipelines.conditioning import Conditioning
    from flowgrpo.policies.pipelines.pipeline import PipelinePolicy

NAME = "answers"  # name of the head among a policy's weights
LAST = ("proj_out", "conv_out")  # last layers of diffusers' transformers and U-Nets
Asked = Sequence[tuple[int, str, Sequence[str]]]  # the row of a picture, a question about it, and its choices


class PictureReader:
    """States of a policy's denoiser that reads clean latents.

    time: sigma, or of a variance-preserving process the share of its timesteps. width: of the states, C.
    Raises UserError for a denoiser whose last layer has another name.
    """

    def __init__(self, policy: PipelinePolicy, time: float):
        self.policy, self.layers = policy, [last_layer(module) for module in policy.denoisers.values()]
        alphas = policy.stock.alphas_cumprod.cpu() if policy.process == "vp" else None
        self.times = exploration(torch.tensor([time]), 1, Euler(), False, False, alphas)
        self.width: int = getattr(self.layers[0], "in_features", None) or self.layers[0].in_channels
        self._empty: Conditioning | None = None  # the empty prompt

    def __call__(self, latents: Tensor) -> Tensor:
        """Return the states [B, N, C] of N places of clean latents [B,*D], with gradients where enabled.

        Raises UserError for a pipeline that calls its denoiser for other rows than these.
        """
        policy, seen, grid = self.policy, list[Tensor](), self.times.grid
        if self._empty is None:
            self._empty = policy.encode([""])
        x0 = latents.to(policy.device, policy.dtype)
        x, _ = noised_states(x0, torch.zeros_like(x0), grid[0].item(), policy.device, policy.process == "vp")
        handles = [layer.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for layer in self.layers]
        try:
            with at_guidance(policy, 1.0):
                policy.replay(self._empty.rows(torch.zeros(len(x), dtype=torch.int64)), x, grid, 0,
                              self.times.timesteps)
        finally:
            for handle in handles:
                handle.remove()
        states = torch.cat([state.flatten(2).transpose(1, 2) if state.ndim == 4 else state for state in seen])
        if len(states) != len(x):
            raise UserError(f"parts.data SelfAnswers: {type(policy.pipe).__name__} calls its denoiser for "
                            f"{len(states)} rows to read {len(x)} images, expected one each: use another pipeline")
        return states


class AnswerHead(torch.nn.Module):
    """Answers to questions from a closed list, read of the denoiser's states.

    Every question has a learned embedding. Its attention over the places tells what is there, and the mean of its gates
    tells how much of it. All choices are equally likely at first.

    questions, answers: the texts of the Q questions and of the A answers. hidden: the width inside.
    """

    def __init__(self, reader: PictureReader, questions: Sequence[str], answers: Sequence[str], hidden: int):
        super().__init__()
        self.reader = reader  # no module, so that the denoiser is not the head's
        self.questions = {question: number for number, question in enumerate(questions)}
        self.answers = {answer: number for number, answer in enumerate(answers)}
        self.norm = torch.nn.LayerNorm(reader.width)
        self.question = torch.nn.Embedding(len(questions), hidden)
        self.key, self.value = (torch.nn.Linear(reader.width, hidden) for _ in range(2))
        self.mix, self.out = torch.nn.Linear(3 * hidden, hidden), torch.nn.Linear(hidden, len(answers))
        torch.nn.init.zeros_(self.out.weight)
        torch.nn.init.zeros_(self.out.bias)

    def forward(self, latents: Tensor, asked: Asked) -> Tensor:
        """Return the log-probability of every answer to n questions about clean latents [B,*D]: float32 [n, A], -inf
        for those that are no choice.

        Raises UserError for a question or an answer that it does not know.
        """
        states = self.norm(self.reader(latents).float())
        key, value = self.key(states), self.value(states)
        rows = torch.tensor([row for row, *_ in asked], device=key.device)
        known = [self._number(self.questions, question) for _, question, _ in asked]
        question = self.question(torch.tensor(known, device=key.device))
        near = (key[rows] @ question[..., None])[..., 0] / question.shape[1]**0.5  # [n, N]
        what = (near.softmax(1)[:, None] @ value[rows])[:, 0]
        much = (near.sigmoid()[:, None] @ value[rows])[:, 0] / near.shape[1]
        scores = self.out(torch.nn.functional.silu(self.mix(torch.cat([what, much, question], 1))))
        return scores.masked_fill(~self._allowed(asked).to(scores.device), -torch.inf).log_softmax(1)

    def numbers(self, answers: Sequence[str]) -> Tensor:
        """Return the numbers [n] of answers."""
        return torch.tensor([self._number(self.answers, answer) for answer in answers])

    def _allowed(self, asked: Asked) -> Tensor:
        allowed = torch.zeros(len(asked), len(self.answers), dtype=torch.bool)
        for place, (*_, choices) in enumerate(asked):
            allowed[place, [self._number(self.answers, choice) for choice in choices]] = True
        return allowed

    @staticmethod
    def _number(known: dict[str, int], text: str) -> int:
        if text not in known:
            raise UserError(f"the run's own answers know no {text[:60]!r}: expected the questions and choices of its "
                            "training and held-out prompts")
        return known[text]


def likeliest(logp: Tensor, right: Tensor) -> Tensor:
    """Return whether each right answer [n] is likelier than every other one: bool [n]. logp: [n, A]."""
    own = logp.gather(1, right[:, None])
    return (own > logp.scatter(1, right[:, None], -torch.inf)).all(1)


def last_layer(denoiser: torch.nn.Module) -> Any:
    """Return the last layer of a denoiser. Raises UserError where it has another name than diffusers' usual ones."""
    for name in LAST:
        layer = getattr(denoiser, name, None)
        if hasattr(layer, "in_features") or hasattr(layer, "in_channels"):
            return layer
    raise UserError(f"parts.data SelfAnswers: {type(denoiser).__name__} has no last layer {' or '.join(LAST)}, whose "
                    "input it reads: use another model")


def made(policy: PipelinePolicy, time: float, hidden: int, texts: tuple[Sequence[str], Sequence[str]], seed: int
         ) -> AnswerHead:
    """Return a fresh head of a policy, trained among its weights from here on. texts: questions and answers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = AnswerHead(PictureReader(policy, time), *texts, hidden).to(policy.device)
    policy.weights.add(NAME, head)
    return head
