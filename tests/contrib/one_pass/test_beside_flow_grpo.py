"""The script that measures an epoch beside flow_grpo's functions; a stand-in by their paper is in the clone's place."""

import sys
from pathlib import Path

import pytest

from flowgrpo.errors import UserError

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "measure"))

import beside_flow_grpo  # noqa: E402

# A step of Flow-GRPO (2505.05470, eq. 9) and a rollout of such steps, with the signatures of its code.
STEP = """
import math
import torch

def sde_step_with_logprob(scheduler, velocity, timestep, x, noise_level=0.7, prev_sample=None):
    [step] = {scheduler.index_for_timestep(t) for t in timestep}
    s, after, second = (scheduler.sigmas[k] for k in (step, step + 1, 1))
    g2, d = noise_level**2 * s / (1 - (s if s < 1 else second)), after - s
    mean = x * (1 + g2 / (2 * s) * d) + velocity * (1 + g2 * (1 - s) / (2 * s)) * d
    std = (-g2 * d) ** 0.5
    drawn = mean + std * torch.randn_like(x) if prev_sample is None else prev_sample
    score = -((drawn - mean) / std) ** 2 / 2 - std.log() - math.log(2 * math.pi) / 2
    return drawn, score.mean((1, 2, 3)), mean, std
"""
ROLLOUT = """
import torch
from .sd3_sde_with_logprob import sde_step_with_logprob

@torch.no_grad()
def pipeline_with_logprob(self, prompt_embeds, pooled_prompt_embeds, sigmas, noise_level, **_):
    self.scheduler.set_timesteps(sigmas=sigmas)
    states, scores = [torch.randn(len(prompt_embeds), 4, 16, 16)], []
    for t in self.scheduler.timesteps:
        x = states[-1]
        velocity = self.transformer(hidden_states=x, timestep=t.expand(len(x)), encoder_hidden_states=prompt_embeds,
                                    pooled_projections=pooled_prompt_embeds, return_dict=False)[0]
        x, score, _, _ = sde_step_with_logprob(self.scheduler, velocity, t[None], x, noise_level)
        states.append(x)
        scores.append(score)
    return x, states, scores
"""
SMALL = ["--cases", "window_2_of_6", "--repetitions=1", "--epochs=1", "--option", "train.group=2", "--option",
         "train.micro_batch=2"]


@pytest.fixture
def clone(monkeypatch, tmp_path) -> Path:
    folder = tmp_path / beside_flow_grpo.FOLDER
    folder.mkdir(parents=True)
    (folder / "sd3_sde_with_logprob.py").write_text(STEP)
    (folder / "sd3_pipeline_with_logprob.py").write_text(ROLLOUT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("flow_grpo", "flow_grpo.diffusers_patch", "flow_grpo.diffusers_patch.sd3_sde_with_logprob",
                 "flow_grpo.diffusers_patch.sd3_pipeline_with_logprob"):
        monkeypatch.setitem(sys.modules, name, None)  # to be taken away at the end
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def ran(monkeypatch, capsys, *words: str) -> tuple[int, list[str]]:
    monkeypatch.setattr(sys, "argv", ["beside_flow_grpo.py", *words])
    code, said = beside_flow_grpo.main(), capsys.readouterr()
    return code, said.out.splitlines() + said.err.splitlines()[-1:] * (code == 2)


def test_both_sides_do_the_same_work_and_every_ratio_is_printed(clone, monkeypatch, capsys):
    """Two prompts of two samples, six steps, two of them trained: 24 rows are sampled, 8 replayed."""
    code, lines = ran(monkeypatch, capsys, str(clone), *SMALL)
    assert code == 0 and lines[0].startswith("yifan123/flow_grpo unknown; this program ")
    replayed = "{'forward': 32, 'backward': 8}"
    assert lines[1].startswith(f"window_2_of_6: {{'replay': {replayed}, 'one_pass': {{'forward': 24, 'backward': 8}}, "
                               f"'theirs': {replayed}, 'same': {replayed}}} rows, log-probabilities differ by ")
    cells = lines[4].split("|")[1:-1]
    assert len(lines) == 5 and cells[0] == " window_2_of_6 " and len(cells) == 1 + len(beside_flow_grpo.RATIOS)
    assert all(float(cell.split()[0]) > 0 for cell in cells[1:])


def test_another_mean_of_the_log_probability_ends_it_before_any_clock(clone, monkeypatch, capsys):
    file = clone / beside_flow_grpo.FOLDER / "sd3_sde_with_logprob.py"
    file.write_text(STEP.replace("score.mean(", "score.sum("))
    code, lines = ran(monkeypatch, capsys, str(clone), *SMALL)
    assert code == 2 and len(lines) == 2
    assert lines[1].startswith("log-probabilities differ by ") and "expected 1e-05 at most" in lines[1]


def test_a_shared_first_noise_is_other_work(clone, monkeypatch, capsys):
    code, lines = ran(monkeypatch, capsys, str(clone), *SMALL, "--option", "parts.roots=1")
    assert code == 2 and lines[1].startswith("replay: {'forward': 28, 'backward': 6} rows, expected {'forward': 32, ")


def test_one_pass_saves_the_rows_of_the_trained_steps():
    theirs = {"forward": 32, "backward": 8}
    found = {"one_pass": {"forward": 24, "backward": 8}, "theirs": theirs}
    beside_flow_grpo.require_same_work(found, 8)
    with pytest.raises(UserError, match="one_pass: .* rows, expected {'forward': 28, "):
        beside_flow_grpo.require_same_work(found, 4)


def test_a_folder_without_flow_grpo(monkeypatch, capsys, tmp_path):
    code, [line] = ran(monkeypatch, capsys, str(tmp_path))
    assert code == 2 and line == (f"{tmp_path} has no folder flow_grpo/diffusers_patch, expected a clone of "
                                  "yifan123/flow_grpo: git clone https://github.com/yifan123/flow_grpo")


def test_a_clone_without_the_function(clone, monkeypatch, capsys):
    (clone / beside_flow_grpo.FOLDER / "sd3_pipeline_with_logprob.py").write_text("")
    code, [line] = ran(monkeypatch, capsys, str(clone))
    assert code == 2 and "has no attribute 'pipeline_with_logprob', expected a clone of yifan123/flow_grpo" in line


def test_a_row_has_medians_and_all_repetitions():
    found = [{"replay": replay, "one_pass": 1.0, "bare": 3.0, "theirs": 2.0, "same": 2.0} for replay in (1.0, 3.0, 2.0)]
    assert beside_flow_grpo.line("all_of_10", found) == (
        "| all_of_10 | 1.00 (0.50, 1.50, 1.00) | 0.50 (0.50, 0.50, 0.50) | 1.00 (0.50, 1.50, 1.00) | "
        "0.50 (0.50, 0.50, 0.50) | 1.50 (1.50, 1.50, 1.50) |")
