"""A masked language model as a policy: orders, traces and their densities, replays, and runs through the same loop."""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo import methods
from flowgrpo.advantages.group import Advantage
from flowgrpo.advantages.selection import DropZeroVariance
from flowgrpo.methods import overlay, presets
from flowgrpo.objectives.kl import SampledKL
from flowgrpo.objectives.ratios import PlainRatio
from flowgrpo.objectives.references import PreviousPolicy
from flowgrpo.objectives.surrogates import Clip
from flowgrpo.policies import build
from flowgrpo.run import run
from flowgrpo.starter.arithmetic import build_tokenizer
from flowgrpo.text.policies.masked_lm import MaskedLM
from flowgrpo.text.samplers.decoding import Decoding, Unmasking
from tests.helpers import tiny_runs, updates
from tests.helpers import tiny_text as tiny
from tests.helpers.refusals import message
from tests.helpers.tables import close
from tests.helpers.tiny_masked import load_masked_lm, model, policy
from tests.helpers.tiny_text import ASKED, files_of_a_run, many, sampled

F64 = torch.float64
FILE = "adapter_model.safetensors"


def exact(**text) -> MaskedLM:
    """In float64, its adapter moved off the base."""
    own = tiny.stir(policy(**text))
    own.model.double()
    return own


def replayed(own: MaskedLM, asked, found, unmasking=Unmasking(), together: int = 100):
    return own.log_probs(asked, torch.arange(len(found.ids)), found.ids, found.mask, unmasking, found.steps, together)


def states(own: MaskedLM, prompt: torch.Tensor, ids: torch.Tensor, steps: torch.Tensor, merged: int = 1):
    """Of one row: (the tokens scored together, bool [L], and the model's logits [L,V] there, the mask's left out)."""
    for first in range(0, int(steps.max()) + 1, merged):
        answer = torch.where(steps < first, ids, own.mask)
        logits = own.model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt):].detach().clone()
        logits[:, own.mask] = -torch.inf
        yield (steps >= first) & (steps < first + merged), logits


def by_hand(own: MaskedLM, asked, found, temperature: float = 1.0, merged: int = 1) -> torch.Tensor:
    """Log-probabilities [B,L], row by row and step by step, from the model's own logits."""
    rows = torch.zeros(found.ids.shape, dtype=F64)
    for row, (prompt, ids, steps) in enumerate(zip(asked.ids, found.ids, found.steps)):
        for at, logits in states(own, prompt, ids, steps, merged):
            rows[row, at] = (logits / temperature).log_softmax(-1).gather(1, ids[:, None])[at, 0].double()
    return rows.masked_fill(~found.mask, 0.0)


# --- orders ----------------------------------------------------------------------------------------------------------
def test_steps_and_surest_places_by_hand():
    assert Unmasking(per_step=2).schedule(5) == [(0, 5, 2), (0, 5, 2), (0, 5, 1)]
    assert Unmasking(per_step=2, block=3).schedule(7) == [(0, 3, 2), (0, 3, 1), (3, 6, 2), (3, 6, 1), (6, 7, 1)]
    assert Unmasking(block=9).schedule(2) == [(0, 2, 1), (0, 2, 1)]
    surest = torch.tensor([[0.5, 0.9, 0.7, 0.9], [0.6, 0.6, 0.6, 0.99]], dtype=F64)
    logits = torch.stack([surest, 1 - surest], -1).log() + 3.0  # of logits a constant says nothing
    masked = torch.tensor([[True, True, True, True], [True, True, True, False]])
    lots = torch.tensor([[0.1, 0.2, 0.4, 0.3], [0.3, 0.1, 0.2, 0.9]])
    assert Unmasking().choose(logits, masked, lots, 2).tolist() == [[1, 3], [0, 1]]
    assert Unmasking(0.01).choose(logits, masked, lots, 3).tolist() == [[1, 3, 2], [0, 1, 2]]  # whatever the sampling's
    assert Unmasking(order="random").choose(logits, masked, lots, 2).tolist() == [[2, 3], [0, 2]]


@pytest.mark.parametrize("unmasking, length, expected", [
    (Unmasking(), 5, [0, 1, 2, 3, 4]),
    (Unmasking(shrink=2), 5, [0, 0, 1, 1, 2]),
    (Unmasking(shrink=2, block=3), 6, [0, 0, 1, 2, 2, 3]),  # never across blocks
    (Unmasking(shrink=2, block=3, per_step=2), 7, [0, 0, 1, 1, 2]),
    (Unmasking(shrink=9), 5, [0, 0, 0, 0, 0])])
def test_which_steps_are_scored_together_by_hand(unmasking, length, expected):
    steps = torch.arange(len(unmasking.schedule(length)))
    assert unmasking.scorings(steps, length).tolist() == expected


def test_every_step_of_a_rollout_takes_the_surest_places():
    own = exact()
    asked, found = sampled(own, decoding=Unmasking(1.5, per_step=2))
    for prompt, ids, steps in zip(asked.ids, found.ids, found.steps):
        assert steps.sort().values.tolist() == [0, 0, 1, 1, 2, 2]
        for step, (at, logits) in enumerate(states(own, prompt, ids, steps)):
            sure = logits.softmax(-1).amax(-1)
            assert sure[at].min() >= sure[steps > step].max() if (steps > step).any() else at.any()


def test_blocks_are_filled_from_left_to_right():
    _, found = sampled(policy(), decoding=Unmasking(block=2))
    assert ((found.steps // 2) == torch.tensor([0, 0, 1, 1, 2, 2])).all()
    assert {tuple(row[:2]) for row in found.steps.tolist()} == {(0, 1), (1, 0)}  # within a block by confidence


# --- densities -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("unmasking", [Unmasking(), Unmasking(0.7, per_step=2), Unmasking(order="random"),
                                       Unmasking(1.3, per_step=2, block=3, order="random")])
def test_a_trace_is_scored_in_its_own_states(unmasking):
    own = exact()
    asked, found = sampled(own, decoding=unmasking)
    expected = by_hand(own, asked, found, unmasking.temperature)
    close(found.logp, expected)
    again = replayed(own, asked, found, unmasking)
    close(again.logp.detach(), expected)
    assert torch.equal(again.mask, found.mask) and (expected < 0).any() and not (found.ids == own.mask).any()


def test_cuts_are_those_of_decoding():
    own, unmasking = exact(), Unmasking(1.3, top_p=0.9, top_k=5, min_p=0.02)
    asked, found = sampled(own, decoding=unmasking)
    close(replayed(own, asked, found, unmasking).logp.detach(), found.logp)
    for prompt, ids, steps, logp, mask in zip(asked.ids, found.ids, found.steps, found.logp, found.mask):
        for at, logits in states(own, prompt, ids, steps):
            kept = Decoding(1.3, top_p=0.9, top_k=5, min_p=0.02)(logits)[at].gather(1, ids[at][:, None])[:, 0]
            close(logp[at], torch.where(mask[at], kept, 0.0))


def test_orders_of_two_tokens_add_up_to_the_joint_distribution():
    """p(a, b) is the mean over the two orders, of what the model says of the first and then of the second."""
    own = exact(max_tokens=2)
    asked, size = own.encode(["1+2="]), own.mask  # the mask is the last token
    pairs = torch.tensor(list(itertools.product(range(size), repeat=2)))
    def told(answer: list[int]) -> torch.Tensor:
        logits = own.model(input_ids=torch.cat([asked.ids[0], torch.tensor(answer)])[None]).logits[0, -2:].detach()
        return logits[:, :size].softmax(-1)  # [place, token]
    left, right = told([own.mask] * 2)
    joint = torch.stack([left[a] * told([a, own.mask])[1] for a in range(size)]) / 2
    joint += torch.stack([right[b] * told([own.mask, b])[0] for b in range(size)], 1) / 2
    everything, of = torch.ones(pairs.shape, dtype=torch.bool), torch.zeros(len(pairs), dtype=torch.int64)
    with torch.no_grad():
        found = [own.log_probs(asked, of, pairs, everything, Unmasking(), torch.tensor([order] * len(pairs)), 512).logp
                 for order in ([0, 1], [1, 0])]
    close((found[0].sum(1).exp() + found[1].sum(1).exp()) / 2, joint.flatten())
    close(joint.sum(), 1.0)
    count = 3000
    _, drawn = sampled(own, ["1+2="] * count, range(count), Unmasking(order="random"))
    for place, marginal in enumerate((joint.sum(1), joint.sum(0))):
        shares = torch.bincount(drawn.ids[:, place], minlength=size) / count
        assert ((shares - marginal).abs() <= 4 * (marginal * (1 - marginal) / count).sqrt() + 1e-9).all()


@pytest.mark.parametrize("block, merged", [(0, 2), (0, 4), (3, 2)])
def test_neighbouring_steps_are_scored_as_one(block, merged):
    own, unmasking = exact(), Unmasking(shrink=merged, block=block)
    asked, found = sampled(own, decoding=unmasking)
    if not block:
        close(found.logp, by_hand(own, asked, found, merged=merged))
    before = own.evaluations
    close(replayed(own, asked, found, unmasking).logp.detach(), found.logp)
    whole = torch.ones_like(found.mask)
    assert own.evaluations - before <= (4 if block else math.ceil(6 / merged)) * sum(len(ids) + 6 for ids in asked.ids)
    before = own.evaluations
    own.log_probs(asked, torch.arange(4), found.ids, whole, unmasking, found.steps, 100)
    assert own.evaluations - before == (4 if block else math.ceil(6 / merged)) * sum(len(ids) + 6 for ids in asked.ids)
    _, plain = sampled(own, decoding=Unmasking(block=block))
    assert torch.equal(plain.ids, found.ids) and (plain.logp - found.logp).abs().max() > 1e-3


def test_answers_are_of_the_likeliest_tokens_and_no_batch():
    own = policy()
    for unmasking in (Unmasking(), Unmasking(per_step=2, order="random")):
        _, together = sampled(own, decoding=unmasking)
        for row, prompt in enumerate(ASKED):
            _, alone = sampled(own, [prompt], [row + 1], unmasking)
            assert torch.equal(alone.ids[0], together.ids[row]) and torch.equal(alone.steps[0], together.steps[row])
            close(alone.logp[0].double(), together.logp[row], 1e-5)
    own = exact()
    asked, found = sampled(own, greedy=2)
    for row in range(2):
        for at, logits in states(own, asked.ids[row], found.ids[row], found.steps[row]):
            assert found.ids[row][at] == logits[at].argmax(-1)
    assert own.generate(asked.rows(torch.arange(2)), own.generators([9, 9])) == found.texts[:2]
    assert own.generate(asked, own.generators([9] * 4))[2:] != found.texts[2:]


def test_what_is_computed_again_gives_the_same_gradient():
    found = []
    for together in (100, 3, 1):
        own = exact()
        asked, made = sampled(own)
        weights = torch.arange(1.0, 5.0, dtype=F64)[:, None] * torch.arange(1.0, 7.0, dtype=F64)
        (replayed(own, asked, made, together=together).logp * weights).sum().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in own.weights.parameters()]))
    assert found[0].norm() > 0
    for other in found[1:]:
        close(other, found[0], 1e-10 * found[0].norm().item())


def test_the_logits_of_a_family_made_from_causal_models_are_those_of_the_next_place():
    loaded = model()
    loaded[0].config.model_type = "Dream"
    own, plain = policy(loaded), policy()
    asked = plain.encode(["1+2="])
    prompts, answers = asked.ids[0][None], torch.full((1, 6), plain.mask)
    assert torch.equal(own._logits(prompts, answers)[:, 1:], plain._logits(prompts, answers)[:, :-1])
    asked, found = sampled(own)
    close(replayed(own, asked, found).logp.detach().double(), found.logp, 1e-5)


# --- models ----------------------------------------------------------------------------------------------------------
def saved(folder, **changes):
    """A tiny model's folder, its config.json changed."""
    tiny.save(folder, model())
    told = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def test_the_kind_of_a_model_is_told_by_its_architecture(tmp_path):
    saved(tmp_path / "bert")
    tiny.model()[0].save_pretrained(tmp_path / "causal")
    for name, family in (("llada", "llada"), ("dream", "Dream")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": ["Own"], "model_type": family}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    found = [build.kind(tiny.config(model=str(tmp_path / name))) for name in ("bert", "llada", "dream", "causal")]
    assert found == [build.MASKED_LM] * 3 + [build.CAUSAL_LM]
    assert build.kind(tiny.config(), model()) == build.MASKED_LM
    assert build.kind(tiny.config(model="some/model", method="trace_rl")) == build.MASKED_LM
    unmasks = {"decoding": {"type": "Unmasking"}}
    assert build.kind(tiny.config(model="some/model", method="gspo", parts=unmasks)) == build.MASKED_LM
    assert build.kind(tiny.config(model="some/model", method="gspo")) == build.CAUSAL_LM
    assert "config.json is not JSON" in message(lambda: build.kind(tiny.config(model=str(tmp_path / "broken"))))


def test_models_without_a_mask_and_published_trace_rl():
    bert, _ = model()
    assert "which token is a mask" in message(lambda: policy((bert, build_tokenizer())))
    found = methods.preset("trace_rl")
    expected = {"decoding": Unmasking(), "log_ratio": PlainRatio(), "surrogate": Clip(0.2, 0.2),
                "reduction": methods.preset("dapo").loss.reduction, "kl": SampledKL(0.01, "k3"),
                "reference": PreviousPolicy(),
                "selection": DropZeroVariance(), "advantage": Advantage("group", "rewards", clamp=math.inf)}
    assert {key: found.parts()[key] for key in expected} == expected


CODE = """
from transformers import BertConfig, BertForMaskedLM


class OwnConfig(BertConfig):
    model_type = "llada"


class OwnModel(BertForMaskedLM):
    config_class = OwnConfig
"""


def test_a_models_own_code_runs_only_where_that_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = saved(tmp_path / "own", architectures=["OwnModel"], model_type="llada", mask_token_id=16,
                   auto_map={"AutoConfig": "own_code.OwnConfig", "AutoModel": "own_code.OwnModel"})
    (folder / "own_code.py").write_text(CODE)
    assert build.kind(tiny.config(model=str(folder))) == build.MASKED_LM
    assert "trust_remote_code: true" in message(lambda: load_masked_lm(str(folder)))
    own = policy(load_masked_lm(str(folder), trust_remote_code=True))
    assert type(own.model).__name__ == "OwnModel" and own.mask == 16 and not own.shift
    assert torch.equal(sampled(own)[1].ids, sampled(policy())[1].ids)


# --- methods ---------------------------------------------------------------------------------------------------------
def test_what_is_for_tokens_unmasks_and_what_unmasks_is_not_for_causal_models():
    causal = ("spo_chain", "spo_tree", "gigpo", "s_grpo", "latr", "visurf", "rl_plus", "chord", "relift", "rover",
              "hypo")
    fits = {*presets.presets_for("tokens"), "trace_rl", "trace_rl_value", "drakes"} - {*causal}
    assert {*presets.presets_for("masks")} == fits
    assert methods.preset("gspo").on("masks").rollout.decoding == Unmasking()
    warm = overlay.with_parts(methods.preset("remax"), {"decoding": {"temperature": 0.5, "min_p": 0.1}})
    assert warm.on("masks").rollout.decoding == Unmasking(0.5, min_p=0.1, greedy=1)
    assert methods.preset("trace_rl").on("masks") == methods.preset("trace_rl")
    told = message(lambda: methods.preset("trace_rl").on("tokens"))
    assert "masked language models (it samples by Unmasking" in told and "flowgrpo list methods" in told
    assert "a method of denoisers" in message(lambda: methods.preset("mix_grpo").on("masks"))
    assert "a method of language models" in message(lambda: methods.preset("trace_rl").on("flow"))


def trainer(**options):
    return tiny.trainer(policy(), {"short": many}, **options)


@pytest.mark.parametrize("method, kernel", [("trace_rl", {"shrink": 2}),
                                            ("gspo", {"type": "Unmasking", "per_step": 4})])
def test_micro_batches_change_no_gradient(method, kernel):
    updates.assert_one_gradient([updates.moved_gradient(trainer(
        method=method, parts={"decoding": kernel}, train__micro_batch=size)) for size in (1, 5, 64)])


@pytest.mark.parametrize("shrink", [2, 6])
def test_the_first_ratio_of_shrunk_replays_is_one(shrink):
    own = trainer(method="trace_rl", parts={"decoding": {"shrink": shrink, "temperature": 0.7}})
    own.run_epoch()
    assert own.first_ratio.max_log_ratio <= 1e-5


def arguments(folder, **options):
    return tiny.config(folder, method="trace_rl", **options), dict(
        pipe=model(), functions={"short": many}, prompts=[tiny.Prompt(text) for text in tiny.PROMPTS])


def test_a_run_leaves_its_adapter_and_its_numbers(tmp_path):
    settings, given = arguments(tmp_path, eval__every=1, parts={"decoding": {"per_step": 2}})
    summary = run(settings, **given)
    assert summary["max_first_log_ratio"] <= 1e-5 and summary["unit"] == "tokens"
    assert math.isfinite(summary["after"]["short"])
    for name in (FILE, "adapter_config.json", "before_after.png", "report.html"):
        assert (tmp_path / "run" / name).is_file(), name


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    one, two = tiny_runs.whole_and_resumed(arguments, tmp_path)
    assert (one / FILE).read_bytes() == (two / FILE).read_bytes()


def test_texts_from_a_finished_run_on_the_command_line(tmp_path, capsys):
    from flowgrpo.cli import main
    settings = files_of_a_run(tmp_path, model(), method="trace_rl", train__lr=0.05, train__epochs=6,
                              parts={"decoding": {"per_step": 3}})
    run(settings)
    capsys.readouterr()
    asked = ["sample", settings.model, "--prompt", "1+2=", "--prompt", "7+8=", "--lora", str(settings.folder)]
    assert main(asked) == 0
    said = capsys.readouterr().out.splitlines()
    own = policy(load_masked_lm(settings.model), unmasking=Unmasking(per_step=3))
    own.weights.load({  # by the live parameters' names
        key.replace("base_model.model.", "model.").replace(".weight", ".default.weight"): value
        for key, value in load_file(settings.folder / FILE).items()})
    assert said == own.generate(own.encode(["1+2=", "7+8="]), own.generators([0, 0]))
    assert main(["compare", "grid", str(settings.folder), "--count", "2"]) == 0
    assert (settings.folder / "grid.png").is_file()
