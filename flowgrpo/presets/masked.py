"""Presets of masked language models."""

from __future__ import annotations

from dataclasses import replace

from flowgrpo import objectives, selection
from flowgrpo.method import Method
from flowgrpo.parts import baselines, critic, reductions, references
from flowgrpo.presets.texts import grpo
from flowgrpo.samplers import tokens


def trace_rl(method: Method = Method()) -> Method:
    """TraceRL: of a masked language model, every token's ratio in the state of its own decoding step (2509.06949)."""
    return replace(grpo(method), kernel=tokens.Unmasking(), selection=selection.DropZeroVariance(),
                   reduction=reductions.PerDecision(), kl=objectives.SampledKL(0.01, "k3"), reference=references.Old())


def trace_rl_value(method: Method = Method()) -> Method:
    """TraceRL with its value model: advantages per token, by GAE over the steps of a trace (2509.06949)."""
    return replace(trace_rl(method), value=critic.ValueHead(), advantage=baselines.NoBaseline())
