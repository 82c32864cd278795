"""Extensions: the moments that each overrides, the features that turn them on, their order in an epoch, their state."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from flowgrpo.config import features
from flowgrpo.contrib.questions.answer_losses import HeldOutAnswers
from flowgrpo.contrib.sibling import OnSibling
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.signals import Stopped
from flowgrpo.errors import UserError
from flowgrpo.methods import capabilities
from flowgrpo.methods.setup import Setup
from flowgrpo.policies import build
from flowgrpo.tools.check import tiny as pipelines
from flowgrpo.train import Trainer
from flowgrpo.training import extensions, state
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Extensions
from tests.contrib.engine.server import TinyEngine, serving
from tests.helpers import loop, tiny, tiny_runs, tiny_text
from tests.helpers.refusals import message, refused

PUBLIC = {name: value for name, value in vars(Extension).items() if not name.startswith("_")}
MOMENTS = [name for name, value in PUBLIC.items() if inspect.isfunction(value)]  # in the order of an epoch
OF_AN_EPOCH = MOMENTS[:MOMENTS.index("on_trained") + 1]


def listed() -> list[type[Extension]]:
    """The classes of all features, in the order in which they are called."""
    return [features.at(feature.extension) for feature in extensions.list_extensions()]


def made_of_all() -> list[Extension]:
    """An extension of every feature, as a run makes it."""
    sign = [{"at": 1, "when": {}}]
    answers = {"data": {"type": "NextToken", "source": {"type": "PassRate"}}}
    trainers = [tiny_text.trainer(phases=sign, train__extrapolate=3, train__extrapolate_every=2,
                                  parts=answers | {"redraw": {"type": "DynamicSampling"},
                                                   "replay": {"type": "GroupReplay"},
                                                   "rehearsal": {"type": "Rehearsal", "weight": 1.0},
                                                   "curriculum": {"type": "Variations"},
                                                   "spread": {"type": "Exploring"}}),
                tiny_text.trainer(train__staleness=1), tiny_text.trainer(train__lr="auto"),
                tiny_text.trainer(guard__window=2), tiny_text.trainer(eval__best="frontier", eval__every=1),
                tiny_text.trainer(rewards={"short": tiny_text.short, "long": tiny_text.short},
                                  reward={"short": 1.0, "long": {"limit": {"at_least": 0.5}}}),
                tiny_runs.trainer("tokens", tiny_runs.config("tokens", "grpo", {"value": {"type": "ValueHead"}})),
                tiny_runs.trainer("flow", tiny_runs.config("flow", "mix_grpo", train__one_pass=True)),
                tiny.trainer(method="dmdr", train__steps=4),
                tiny.trainer(method="rlcm", train__steps=4, parts={"distil": {"type": "ConsistencyDistillation"}})]
    pipe, call = pipelines.make("FluxPipeline")
    cached = tiny.config(method="diffusion_nft", image__call=call, rollout__cache="mag")
    trainers.append(Trainer(cached, Accelerator(cpu=True), build.make_policy(cached, torch.device("cpu"), pipe),
                            {"red": tiny.red}, ([Prompt(text) for text in tiny.PROMPTS], [])))
    with serving(TinyEngine(tiny.sd3())) as url:
        trainers.append(tiny.trainer(method="flow_grpo", train__grid="stock", rollout__engine=url))
    return [extension for trainer in trainers for extension in trainer.extensions.present]


# --- the interface ---------------------------------------------------------------------------------------------------
def test_the_moments_are_those_of_an_epoch_in_its_order():
    assert OF_AN_EPOCH == ["around_epoch", "draw_epoch", "on_drawn", "on_credited", "add_steps", "on_backward",
                           "on_gradients", "on_stepped", "on_trained"]
    assert MOMENTS[len(OF_AN_EPOCH):] == ["whole_run", "on_base", "judge", "on_measured", "on_finished", "summary",
                                          "state", "load_state", "close"]
    passed_on = [name for name, value in vars(Extensions).items() if inspect.isfunction(value) and name in MOMENTS]
    assert passed_on == [*OF_AN_EPOCH, "whole_run", "on_base", "judge", "on_measured", "on_finished", "summary",
                         "close"]


@pytest.mark.parametrize("name", extensions.ORDER)
def test_an_extension_overrides_a_moment_with_its_own_parameters_alone(name):
    place = features.KNOWN[name].extension
    cls = features.at(place)
    assert issubclass(cls, Extension) and cls is not Extension
    assert cls.__module__ == place.split(":")[0]
    for ancestor in cls.__mro__[:cls.__mro__.index(Extension)]:
        for name, value in vars(ancestor).items():
            if name not in PUBLIC:
                continue
            of = PUBLIC[name]
            if isinstance(of, classmethod):
                assert isinstance(value, classmethod), name
                assert [*inspect.signature(value.__func__).parameters] == [*inspect.signature(of.__func__).parameters]
            elif inspect.isfunction(of):
                assert inspect.isfunction(value), name
                assert [*inspect.signature(value).parameters] == [*inspect.signature(of).parameters], name
            else:
                assert type(value) is type(of), name


def test_no_attribute_hides_a_moment():
    present = made_of_all()
    # Of models of image tokens, and of two models: tests/contrib makes them.
    assert {type(extension) for extension in present} == {*listed()} - {HeldOutAnswers, OnSibling}
    for extension in present:
        assert not vars(extension).keys() & PUBLIC.keys(), type(extension)


# --- the order -------------------------------------------------------------------------------------------------------
def test_the_order_names_every_feature_once_and_each_state_has_a_key_of_its_own():
    classes = listed()
    assert [feature.name for feature in extensions.list_extensions()] == [*extensions.ORDER]
    assert len({*classes}) == len(classes) == len(extensions.ORDER)
    names = [cls.name for cls in classes if cls.name]
    assert len({*names}) == len(names)
    for cls in classes:
        own = vars(cls).keys()
        assert ("state" in own) == ("load_state" in own) == bool(cls.name), cls
    assert not {*names} & {*state.COUNTERS, *state.SAMPLING, *state.SNAPSHOTS, *state.REQUIRED, "optimizer"}


def test_a_run_has_what_its_configuration_turns_on_in_their_order():
    assert loop.names(tiny_text.trainer()) == ["RewardHints"]
    made = tiny_text.trainer(train__extrapolate=3, train__extrapolate_every=2, phases=[{"at": 1, "set": {}}],
                             parts={"replay": {"type": "GroupReplay"}, "redraw": {"type": "DynamicSampling"}})
    assert loop.names(made) == ["Phases", "Resampling", "RewardHints", "ReplayedGroups", "Extrapolation"]


# --- a toy -----------------------------------------------------------------------------------------------------------
def noted(moment: str) -> Callable[..., None]:
    """A moment that is recorded with the number that it is given, and does nothing."""
    return lambda self, *given: self.calls.append(" ".join([moment, *map(str, given)]))


class Toy(Extension):
    """Records its moments."""

    name = "toy"

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.calls: list[str] = []
        self.at = -1
        self.count = torch.zeros(1)

    @classmethod
    def require(cls, setup: Setup) -> None:
        if setup.config.train.group == 2:
            raise UserError("a toy needs more than 2")

    @contextlib.contextmanager
    def around_epoch(self) -> Iterator[None]:
        self.calls.append("around_epoch")
        yield
        self.calls.append("end of around_epoch")

    def draw_epoch(self) -> Epoch | None:
        self.calls.append("draw_epoch")
        return None

    def on_drawn(self, epoch: Epoch) -> None:
        self.calls.append("on_drawn")
        assert epoch.groups.turn == 1 and all(not part.advantages for part in epoch.parts)

    def on_credited(self, epoch: Epoch) -> None:
        self.calls.append("on_credited")
        assert epoch.weights and all(part.advantages for part in epoch.parts)

    def add_steps(self, steps):
        self.calls.append("add_steps")
        yield from steps
        self.calls.append("end of add_steps")

    def on_trained(self, epoch: Epoch) -> dict[str, Any]:
        self.calls.append("on_trained")
        self.at, self.count = self.trainer.epoch, self.count + 1
        return {"toy": self.count.item()}

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return {"count": self.count}, {"at": self.at}

    def load_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        self.count, self.at = tensors.get("count", torch.zeros(1)), values.get("at", -1)

    on_backward, on_gradients, on_stepped, close = map(noted, ("on_backward", "on_gradients", "on_stepped", "close"))


@pytest.fixture
def table(monkeypatch):
    """The features with the toy's among them."""
    wanted = features.Feature(name="toy", wanted=lambda config, method: config.train.updates == 2, extension=Toy)
    monkeypatch.setitem(features.KNOWN, "toy", wanted)


def test_a_toy_gets_every_moment_of_an_epoch_in_order(table):
    assert "Toy" not in loop.names(tiny_text.trainer())
    made = tiny_text.trainer(train__updates=2, train__inner_epochs=2)
    assert loop.names(made)[-1] == "Toy"
    metrics = made.run_epoch()
    passes = [["add_steps", f"on_backward {update}", f"on_gradients {update}", "on_stepped",
               f"on_backward {update + 1}", f"on_gradients {update + 1}", "on_stepped", "end of add_steps"]
              for update in (0, 2)]
    assert loop.extension(made, "Toy").calls == ["around_epoch", "draw_epoch", "on_drawn", "on_credited", *passes[0],
                                                 *passes[1], "on_trained", "end of around_epoch"]
    assert metrics["toy"] == 1.0 and made.optimization.update == 4


def test_a_toy_that_draws_replaces_the_trainers_draw_and_one_that_does_not_changes_nothing(table, monkeypatch):
    made, plain = tiny_text.trainer(train__updates=2), tiny_text.trainer(train__updates=2)
    plain.extensions.present = [each for each in plain.extensions.present if not isinstance(each, Toy)]
    for trainer in (made, plain):
        trainer.run_epoch()
    tiny_runs.assert_same_weights(plain, made)
    drawn = loop.draw(made)
    monkeypatch.setattr(Toy, "draw_epoch", lambda self: drawn)
    seen: list[Epoch] = []
    loop.watch(made, on_drawn=seen.append)
    sampled = made.progress.sampled
    made.run_epoch()
    assert seen == [drawn] and made.progress.sampled == sampled


@pytest.mark.parametrize("updates, count, at", [(2, 2.0, 1), (1, 0.0, -1)], ids=["kept", "without the toy"])
def test_the_state_of_a_toy_goes_through_a_checkpoint(table, tmp_path, updates, count, at):
    made, other = tiny_text.trainer(train__updates=updates), tiny_text.trainer(train__updates=2)
    tiny_runs.next_epochs(made, 2)
    tiny_runs.resume(made, other, tmp_path)
    toy = loop.extension(other, "Toy")
    assert (toy.count.tolist(), toy.at) == ([count], at) and other.run_epoch()["toy"] == count + 1


def test_a_toy_is_closed_and_checked(table, tmp_path):
    made = tiny_text.trainer(train__updates=2, train__epochs=1)
    made.train(tmp_path, {})
    assert loop.extension(made, "Toy").calls[-1] == "close"
    extensions.check(loop.setup(tiny_text.config(train__updates=2), "causal_lm"))
    small = dict(train__group=2, train__micro_batch=2)
    extensions.check(loop.setup(tiny_text.config(**small), "causal_lm"))  # without the toy
    refused("a toy needs more than 2", extensions.check, loop.setup(
        tiny_text.config(train__updates=2, **small), "causal_lm"))


def test_what_a_toy_needs_and_lacks_is_weighed_with_the_other_extensions_and_the_settings(table, monkeypatch):
    def check(**options: Any) -> None:
        settings = tiny_text.config(train__updates=2, **options)
        extensions.check(loop.setup(settings, "causal_lm", prompts=[Prompt("1+2=")]))
    check(train__staleness=1)
    monkeypatch.setattr(Toy, "missing", classmethod(lambda cls, setup: {capabilities.RECORDABLE: "a toy, which melts"}))
    check()
    refused("train.staleness is 1, which does not go with a toy, which melts: leave one", check, train__staleness=1)
    monkeypatch.setattr(Toy, "needs", frozenset({capabilities.OWN_SAMPLES, capabilities.LORA, capabilities.RECORDABLE}))
    check()  # what it takes itself is no obstacle to it
    assert "the extension Toy is on, which does not go with adapter.rank: 0, which" in message(check, adapter__rank=0)
    replay = {"replay": {"type": "GroupReplay"}}
    refused("parts.replay is GroupReplay, which does not go with a toy, which melts", check, parts=replay)
    monkeypatch.setattr(Toy, "missing", classmethod(lambda cls, setup: {}))
    refused("the extension Toy is on, which does not go with parts.replay, which trains", check, parts=replay)


def test_extensions_name_capabilities_that_there_are():
    setup = loop.setup(tiny_text.config(parts={"replay": {"type": "GroupReplay"}}), "causal_lm")
    for cls in listed():
        assert cls.needs <= {*capabilities.ALL} and cls.missing(setup).keys() <= {*capabilities.ALL}, cls
        assert not cls.needs & cls.missing(setup).keys(), cls


@pytest.mark.parametrize("changes", [False, True])
def test_a_stop_does_not_leave_an_epoch_that_has_changed_an_extensions_state(table, changes, monkeypatch):
    monkeypatch.setattr(Toy, "changes", changes)
    made = tiny_text.trainer(train__updates=2)
    def asked(epoch: Epoch) -> None:
        made.stop.asked = True
    loop.watch(made, on_credited=asked)
    with contextlib.nullcontext() if changes else pytest.raises(Stopped):
        assert made.run_epoch()["toy"] == 1.0


def test_a_package_adds_one(monkeypatch):
    class Entry:
        @staticmethod
        def load() -> Any:
            return type("Added", (Toy,), {"wanted": staticmethod(lambda config, method: config.train.group == 4)})
    monkeypatch.setattr(extensions, "group_entry_points", lambda group: {"added": Entry} if "extensions" in group
                        else {})
    made = tiny_text.trainer()
    assert loop.names(made) == ["RewardHints", "Added"] and made.run_epoch()["toy"] == 1.0
