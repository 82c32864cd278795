"""The loop between the clicks on a tiny model: what is trained, resume after a stop, the head as a reward's folder."""

import os
import random
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowgrpo import rewards
from flowgrpo.contrib.taste import loop, session
from flowgrpo.contrib.taste.head import Head
from flowgrpo.contrib.taste.loop import FEATURES, VOTES, Taste, head_rewards
from flowgrpo.contrib.taste.votes import SKIP, TIE, VoteLog
from flowgrpo.data.pairs import load_pairs
from flowgrpo.errors import UserError
from flowgrpo.export import export
from flowgrpo.storage.places import checkpoints
from flowgrpo.tools.check.tiny import make as built
from flowgrpo.tools.vote.live import LiveBallot
from flowgrpo.training import extensions
from tests.helpers import tiny
from tests.helpers.forked import Forked
from tests.helpers.refusals import refused
from tests.helpers.tiny_runs import assert_same_weights, lines


class Scripted(LiveBallot):
    """A user who answers every question at once, by its name, and finishes after so many votes."""

    def __init__(self, log: VoteLog, votes: int):
        super().__init__(log)
        self.most = votes

    def ask(self, questions):
        super().ask(questions)
        for question in questions:
            if question.name not in self.log.votes:
                if len(self.log.votes) == self.most:
                    self.finish()
                    return
                draw, shown = random.Random(question.name), [*range(len(question.files))]
                self.vote(question.name, shown, draw.choice([*shown, *shown, TIE, SKIP]))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "prompts.txt").write_text("\n".join([*tiny.PROMPTS, "a star", "a ring", "a box", "a hat"]) + "\n")
    return tiny.save(tiny.sd3(), folder / "pipe")


def config(model, output, **options):
    parts = {key.replace("__", "."): value for key, value in options.items()}
    prompts = str(model.parent / "prompts.txt")
    return tiny.config(output, model=str(model), prompts=prompts, method="rlcm", reward="taste", train__grid="stock",
                       train__steps=3, train__epochs=50, train__save_every=1, train__lr=1e-2,
                       eval__prompts=1, parts={"kl": {"weight": 0.03}}, **parts)


def sat(config, votes: int, resume: bool = False, evidence: float = 1e-9, sees: str | None = None) -> int:
    """Sit through a session of so many votes in all; return the number of learned batches, of two epochs each.

    evidence: so few votes are none of a taste, and teach the weights all the same.
    """
    config.folder.mkdir(parents=True, exist_ok=True)
    user = Scripted(VoteLog(config.folder / VOTES), votes)
    taste = Taste(user, config.folder, checks=1, rounds=2, evidence=evidence, sees=sees)
    epochs = session.train(config, taste, resume)
    assert epochs % 2 == 0
    return epochs // 2


def weights_of(config) -> dict[str, torch.Tensor]:
    last = [*checkpoints(config.folder / "checkpoints").values()][-1]
    return {key: value for key, value in load_file(last / "state.safetensors").items() if key.startswith("weights/")}


def test_a_session_that_was_stopped_goes_on_to_the_same_weights(model, tmp_path):
    """Batches have 2 questions and, once weights have changed, one check before them: 2 + 2 + 3 + 3 votes."""
    whole, parted = config(model, tmp_path / "whole"), config(model, tmp_path / "parted")
    assert sat(whole, 10) == 4
    assert sat(parted, 1) == 0 and sat(parted, 5, resume=True) == 2 and sat(parted, 10, resume=True) == 4
    assert (whole.folder / VOTES).read_text() == (parted.folder / VOTES).read_text()
    assert_same_weights(weights_of(whole), weights_of(parted))
    ran, again = lines(whole.folder), lines(parted.folder)
    assert [line["loss"] for line in ran] == [line["loss"] for line in again] and len(ran) == 8
    assert ran[-1]["taste/votes"] <= 8 and all(line["taste/evidence"] >= 1 for line in ran)


def test_a_run_that_ended_within_a_batch_goes_on_to_the_same_weights(model, tmp_path):
    whole, parted = config(model, tmp_path / "whole"), config(model, tmp_path / "parted")
    assert sat(whole, 7) == 3
    short = parted.model_copy(update={"train": parted.train.model_copy(update={"epochs": 3})})
    short.folder.mkdir(parents=True)
    assert session.train(short, Taste(Scripted(VoteLog(short.folder / VOTES), 7), short.folder, 1, 2, 1e-9), False) == 3
    assert sat(parted, 7, resume=True) == 3
    assert_same_weights(weights_of(whole), weights_of(parted))


def on(config) -> None:
    """Begin or go on with a session of 10 votes, in a process of its own."""
    sat(config, 10, resume=(config.folder / VOTES).is_file())


def killed(config, after: int) -> None:
    """As `on`, until SIGKILL comes behind so many votes, while the next one is written."""
    fsync = os.fsync
    def cut(file: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{file}"))
        if place.name == VOTES and place.read_bytes().count(b"\n") > after:
            os.truncate(place, place.stat().st_size - 3)
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(file)
    os.fsync = cut
    on(config)


def test_a_kill_loses_the_click_in_hand_alone(model, tmp_path):
    """The kills come in the first batch, before anything is learned, and in the third, whose checks wait."""
    whole, parted = config(model, tmp_path / "whole"), config(model, tmp_path / "parted")
    assert sat(whole, 10) == 4
    for votes in (1, 6):
        process = Forked(killed, parted, votes)
        assert process.wait() == -signal.SIGKILL, process.streams()
        assert len(VoteLog(parted.folder / VOTES).votes) == votes
    process = Forked(on, parted)
    assert process.wait() == 0, process.streams()
    assert (whole.folder / VOTES).read_text() == (parted.folder / VOTES).read_text()
    assert_same_weights(weights_of(whole), weights_of(parted))


def test_images_beyond_the_limits_bring_the_last_good_weights_back(model, tmp_path):
    """The looks of held-out images need no vote. A session goes on, also from a checkpoint of the first weights, which
    are there again after each epoch that is beyond a limit, and gone after each that is not."""
    limits = {"eval__every": 1, "guard__edge_width": 1 + 1e-9, "guard__diversity": 1 - 1e-9}
    of = config(model, tmp_path, **limits)
    assert sat(of, 4) == 2 and sat(of, 7, resume=True) == 3
    ran = lines(of.folder)
    returns = [0, *(line["guard/returns"] for line in ran)]
    returned = [now - before for before, now in zip(returns, returns[1:])]
    assert len(ran) == 6 and {*returned} <= {0, 1} and returned[0] == 1 and sum(returned) > 1
    weights = weights_of(of)
    assert any("lora_B" in key for key in weights)
    assert all(not weights[key].any() for key in weights if "lora_B" in key) == returned[-1]
    assert all(line["grad_norm"] > 0 and line["held_out/taste"] is None for line in ran)  # nobody votes on these


def test_the_limits_are_on_by_default(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of = session.session_config(str(model), str(model.parent / "prompts.txt"), None, tmp_path / "mine", {}, False)
    assert (of.guard.edge_width, of.guard.diversity, of.eval.every) == (1.1, 0.9, loop.ROUNDS)
    assert of.eval.prompts == session.MEASURED


def test_a_batch_whose_images_were_lost_is_drawn_again(model, tmp_path):
    of = config(model, tmp_path)
    assert sat(of, 4) == 2
    kept, lost = (of.folder / "pictures" / f"000{batch}-q00-0.png" for batch in (2, 3))
    before = kept.stat().st_mtime_ns
    lost.write_bytes(b"")
    assert sat(of, 7, resume=True) == 3
    assert lost.stat().st_size and kept.stat().st_mtime_ns == before


def test_other_votes_train_other_weights(model, tmp_path, monkeypatch):
    one, other = config(model, tmp_path / "one"), config(model, tmp_path / "other")
    assert sat(one, 4) == 2
    monkeypatch.setattr(random.Random, "choice", lambda self, of: of[0])
    assert sat(other, 4) == 2
    first, second = weights_of(one), weights_of(other)
    assert any(not torch.equal(first[key], second[key]) for key in first)


def test_what_a_session_leaves(model, tmp_path, capsys):
    of = config(model, tmp_path)
    learned = sat(of, 7)
    log = VoteLog(of.folder / VOTES)
    summary = session.finish(of, log, 2 * learned)
    against = {"wins": 1.5, "of": 2, "share": "0.75 [0.30, 0.95]"}
    said = session.sentences(of.folder, log, against, summary)
    assert said[1:] == ["of 2 blind pairs with the base, from other noises, you preferred the trained model in 1.5, a "
                        "tie as one half: 0.75 [0.30, 0.95]", "the model learned in 6 epochs"]
    assert summary["epochs"] == 6 and (of.folder / "pytorch_lora_weights.safetensors").is_file()
    assert (of.folder / "report.html").is_file() and len(list((of.folder / "after").glob("*.png")))
    assert all(pair.chosen.is_file() for pair in load_pairs(of.folder / session.PAIRS))
    folder = of.folder / session.REWARD
    reward = rewards.find(str(folder))
    pictures = torch.rand(3, 3, 16, 16)
    scores = reward(pictures, ["red", "blue", "red"])
    assert scores.shape == (3,) and len({*scores.tolist()}) == 3
    assert torch.allclose(reward(pictures[:1], ["red"]), scores[:1], atol=1e-4)
    assert len(list((of.folder / FEATURES).glob("*.safetensors"))) == 5  # of batches 0 to 4


def unshifted(pipe):
    """The pipeline with an autoencoder that has no shift, as Stable Diffusion's."""
    pipe.vae.register_to_config(shift_factor=0.0)
    return pipe


@pytest.mark.parametrize("name, make, call", [
    ("FLUX.1-schnell", tiny.flux, tiny.FLUX_CALL), ("sd-turbo", lambda: unshifted(tiny.sd15()), {}),
    ("sdxl-turbo", lambda: unshifted(built("StableDiffusionXLPipeline")[0]), {}),
    ("Z-Image-Turbo", lambda: built("ZImagePipeline")[0], tiny.FLUX_CALL)])
def test_other_models_by_the_defaults_of_the_command(name, make, call, model, tmp_path, monkeypatch):
    """Micro-batch and learning rate are found; the model's own steps are trained, and the file for ComfyUI is whole."""
    monkeypatch.chdir(tmp_path)
    folder = tiny.save(make(), tmp_path / name)
    small = {"train.prompts": 2, "train.updates": 1, "adapter.rank": 2, "precision": "fp32", "image.call": call,
             "eval.prompts": 2, "eval.grid": 1}
    of = session.session_config(str(folder), str(model.parent / "prompts.txt"), None, tmp_path / "mine", small, False)
    assert sat(of, 4) == 2
    assert all(line["trained_updates"] and line["grad_norm"] > 0 for line in lines(of.folder))
    session.finish(of, VoteLog(of.folder / VOTES), 4)
    trained = load_file(of.folder / "pytorch_lora_weights.safetensors")
    for file in export.lora(of.folder, tmp_path / "lora.safetensors"):
        written = load_file(file)
        assert written and all(value.isfinite().all() for value in written.values())
    assert any(value.any() for key, value in trained.items() if "lora_B" in key or "lora.up" in key)


def test_what_votes_do_not_go_with(model, tmp_path):
    """A reward's extension is checked as those of the configuration are."""
    taste = Taste(Scripted(VoteLog(tmp_path / VOTES), 1), tmp_path)
    assert extensions.extensions_of_rewards({"taste": taste})[0][1] is taste
    with pytest.raises(UserError, match="the samples are voted on, which does not go with"):
        session.train(config(model, tmp_path).model_copy(update={"method": "diffusion_nft", "parts": {}}), taste, False)


def test_rewards_of_a_batch_by_hand():
    head = Head(scale=torch.ones(1), weight=torch.tensor([2.0], dtype=torch.double))
    features = torch.tensor([[[0.0], [1.0]], [[2.0], [5.0]]])
    root = ((1 + 1 + 9 + 9) / 4)**0.5  # scores 0, 2, 4, 10 less their means
    assert head_rewards(head, features).flatten().tolist() == pytest.approx([-1 / root, 1 / root, -3 / root, 3 / root])
    assert head_rewards(Head(head.scale, head.weight * 0), features).abs().max() == 0


def test_votes_without_a_taste_leave_the_weights_where_they_were_and_no_lora(model, tmp_path, capsys):
    of = config(model, tmp_path)
    assert sat(of, 4, evidence=20) == 2
    weights = weights_of(of)
    assert all(not weights[key].any() for key in weights if "lora_B" in key) and any("lora_B" in key for key in weights)
    assert " of 20, so that this batch teaches the weights nothing" in capsys.readouterr().out
    log = VoteLog(of.folder / VOTES)
    assert session.finish(of, log, 4) == {} and not list(of.folder.glob("*.safetensors"))
    assert not (of.folder / session.REWARD).exists() and not any(".c" in name for name in log.votes)
    said = session.sentences(of.folder, log, None, {})
    assert said[0].startswith(f"{sum('.q' in name for name in log.votes)} clicks, ") and len(said) == 2
    assert "nothing is trained, and no LoRA is written, since the clicks could be chance: their evidence" in said[1]


def test_a_head_that_sees_a_reward_too(model, tmp_path):
    """Its score is the last feature, of a session and of the reward that it leaves."""
    of = config(model, tmp_path)
    assert sat(of, 4, sees="sharpness") == 2
    refused("sees sharpness: give --sees sharpness", sat, of, 7, resume=True)
    assert sat(of, 7, resume=True, sees="sharpness") == 3
    plain = config(model, tmp_path / "plain")
    assert sat(plain, 2) == 1
    seen, without = (loop.read_features(each.folder, 0) for each in (of, plain))
    assert torch.equal(seen[..., :-1], without)
    assert session.finish(of, VoteLog(of.folder / VOTES), 6)["epochs"] == 6
    reward, pictures = rewards.find(str(of.folder / session.REWARD)), torch.rand(2, 3, 16, 16)
    rows = reward.models[0].rows(pictures, ["red", "blue"])["features"]
    assert rows[:, -1].tolist() == pytest.approx([float(one) for one in rewards.find("sharpness")(pictures, ["", ""])])


def test_a_session_of_other_features_is_told(model, tmp_path):
    of = config(model, tmp_path)
    assert sat(of, 2) == 1
    save_file({"shown": torch.zeros(2, 4, 3)}, of.folder / FEATURES / "00000.safetensors")
    refused("of an earlier version, whose features are others: begin a new one", sat, of, 4, resume=True)


def test_what_is_said_of_sessions_that_chose_nothing_or_ended_early(model, tmp_path, monkeypatch):
    of = config(model, tmp_path / "none")
    monkeypatch.setattr(random.Random, "choice", lambda self, of: TIE)
    assert sat(of, 4, evidence=20) == 2
    log = VoteLog(of.folder / VOTES)
    assert session.finish(of, log, 4) == {}
    assert session.sentences(of.folder, log, None, {})[0].startswith("4 clicks, 0 of them for an image: votes in ")
    assert "since no image was chosen: --output" in session.sentences(of.folder, log, None, {})[1]
    monkeypatch.undo()
    early = config(model, tmp_path / "early")
    assert sat(early, 1) == 0 and session.finish(early, VoteLog(early.folder / VOTES), 0) == {}
    assert (early.folder / session.PAIRS).is_file() and len(VoteLog(early.folder / VOTES).votes) == 1
    said = session.sentences(early.folder, VoteLog(early.folder / VOTES), None, {})
    assert said[0].startswith("1 click, ") and "since no " in said[1]
