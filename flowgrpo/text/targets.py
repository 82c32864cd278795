"""Rollout of a language model, as a group of a method's parts, and its targets: what the loss of a method scores.
`text.rollouts` samples and replays them."""

from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from typing import ClassVar, Literal

from flowgrpo.errors import UserError
from flowgrpo.methods.groups import OF_TEXT, Credit, Loss
from flowgrpo.methods.method import Method
from flowgrpo.methods.parts import GroupDraw
from flowgrpo.methods.targets import Rollout, Target
from flowgrpo.objectives import ratios, surrogates
from flowgrpo.parts import part
from flowgrpo.samplers import old_policy
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.text.samplers import groups, gumbel_softmax
from flowgrpo.text.samplers.decoding import Decoding, Unmasking


@dataclass(frozen=True)
class TextGeneration:
    """Rollout of a language model.

    decoding: temperature and cuts; of a masked model an `Unmasking`.
    draws: how the completions of a group are drawn.
    """

    decoding: Decoding = Decoding()
    draws: GroupDraw = groups.Independent()

    of_text: ClassVar[bool] = True
    # What the rollout of a pipeline alone can choose: one granularity, drawn by the present policy without previews.
    strides: ClassVar[tuple[int, ...]] = (1,)
    lag: ClassVar[old_policy.Lag] = old_policy.Lag()
    preview: ClassVar[None] = None
    pruning: ClassVar[None] = None

    def fits(self, method: Method, process: str) -> bool:
        """True if it samples models of this process under a method; an unmasking cannot draw left to right."""
        if process not in OF_TEXT or method.asks_about_images and process != "image tokens":
            return False
        if process == "masks":  # answers have no trace
            spread = method.credit.spread
            follows = method.loss.surrogate.reads_uniform  # the state that follows a token
            causal = spread and spread.causal or self.draws.causal or self.decoding.causal
            return not (causal or follows or self.decoding.expert or method.loss.data)
        return not isinstance(self.decoding, Unmasking)

    def on(self, method: Method, process: str, given: Collection[str]) -> Method:
        """The method as a process samples it: "tokens" one after the other, "masks" that become tokens, or "image
        tokens", as many for each image, so that a shaping that only compares lengths is left out, unless it was given.
        Raises UserError for image tokens of a model that writes texts."""
        target = method.target
        if process == "masks":
            unmasking = self.decoding if isinstance(self.decoding, Unmasking) else Unmasking(*astuple(self.decoding))
            return method.having(decoding=unmasking, target=Traces() if isinstance(target, Completions) else target)
        if process == "image tokens":
            shaping = method.credit.shaping
            if shaping is not None and shaping.of_lengths and "shaping" not in given:
                shaping = None
            return method.having(shaping=shaping, target=ImageTokens() if type(target) is Completions else target)
        if "tokens" in target.offers and "texts" not in target.offers:
            raise UserError(f"parts.target {type(target).__name__} is of {target.trains}: set text.generates: image, "
                            "or leave it out")
        return method


@part("target")
class Completions(Target):
    """Tokens of completions, by their log-probability."""

    trains: ClassVar[str] = "completions"
    offers: ClassVar[frozenset[str]] = frozenset({"tokens", "texts", "likelihood", "decisions", "model"})
    of: ClassVar[type] = TextGeneration
    has_logp: ClassVar[bool] = True
    unread: ClassVar[frozenset[str]] = frozenset({"step_weight", "progress", "distil"})

    def of_pairs(self) -> Target:
        return RecordedCompletions() if type(self) is Completions else self

    def validate(self, rollout: Rollout, credit: Credit, loss: Loss, explorations: Sequence[RolloutSpec],
                 group: int) -> None:
        _require_samples(rollout, loss, group)
        if credit.value is not None and credit.spread is not None:
            raise ValueError(f"value and spread ({type(credit.spread).__name__}) both make advantages of tokens: set "
                             "parts.spread: null, or leave the value model out")
        if group % rollout.draws.leaves:
            raise ValueError(f"parts.draws is {type(rollout.draws).__name__} with {rollout.draws.leaves} leaves: "
                             "expected a train.group that is a multiple of them")
        if isinstance(rollout.draws, groups.PrunedDraws) and (rollout.decoding.greedy or credit.value is not None):
            raise ValueError("parts.draws is PrunedDraws, whose samples are all random and whose head is the run's "
                             "only one: set parts.decoding.greedy: 0 and parts.value: null, or leave it out")
        shaping = credit.shaping
        of_experts = {f"surrogate {type(loss.surrogate).__name__}": loss.surrogate.reads_answers,
                      f"shaping {type(shaping).__name__}": shaping is not None and shaping.reads_answers}
        for name in (name for name, is_set in of_experts.items() if is_set and not rollout.decoding.expert):
            raise ValueError(f"the {name} is about answers that join their group: set parts.decoding.expert: 1")
        spreads = credit.spread or credit.value
        if loss.surrogate.reads_advantages and spreads is not None:
            raise ValueError(f"the surrogate {type(loss.surrogate).__name__} reads one advantage per completion, but "
                             f"{type(spreads).__name__} spreads it: set parts.{'spread' if credit.spread else 'value'}"
                             ": null")


@dataclass(frozen=True)
class RecordedCompletions(Completions):
    """Tokens of recorded pairs of completions, without sampling: the target of a run with `preferences`."""

    trains: ClassVar[str] = "recorded pairs of completions"
    recorded: ClassVar[bool] = True
    unread: ClassVar[frozenset[str]] = Completions.unread | {"draws", "spread", "value", "redraw", "replay",
                                                             "rehearsal"}


@dataclass(frozen=True)
class Traces(Completions):
    """Tokens of an unmasking's trace: what completions are of a masked language model."""

    trains: ClassVar[str] = "traces of an unmasking"


@part("target")
class ImageTokens(Completions):
    """Tokens of images: what completions are of a model with `text.generates: image`.

    All have one length, the model's grid, and no text, so parts that read lengths or texts do not go with them.
    scores: "guided": tokens count by the guided distribution, from which they are drawn (AR-GRPO, 2508.06924);
        "conditional": they are drawn guided and count by the unguided one, as in T2I-R1, ULM-R1, GCPO and STAGE: the
        estimate is then not the gradient of what is sampled.
    """

    scores: Literal["guided", "conditional"] = "guided"

    trains: ClassVar[str] = "image tokens"
    offers: ClassVar[frozenset[str]] = Completions.offers - {"texts"} | {"images"}
    takes: ClassVar[dict[str, type]] = {"draws": groups.Independent}

    def validate(self, rollout: Rollout, credit: Credit, loss: Loss, explorations: Sequence[RolloutSpec],
                 group: int) -> None:
        super().validate(rollout, credit, loss, explorations, group)
        texts = {"advantage": "lengths" in credit.advantage.needs, "decoding": rollout.decoding.expert > 0,
                 "reference": getattr(loss.reference, "makes_prompts", False)}
        for name in (name for name, reads in texts.items() if reads):
            raise ValueError(f"parts.{name} reads lengths or words of completions, and image tokens have one length "
                             "and no word: choose another")


@part("target")
class RelaxedTraces(Target):
    """Reward gradient, followed back through the unmasking of an answer (DRAKES, 2410.13643).

    relaxation: what stands for drawn tokens.
    """

    relaxation: gumbel_softmax.GumbelSoftmax = gumbel_softmax.GumbelSoftmax()

    trains: ClassVar[str] = "a relaxed unmasking"
    offers: ClassVar[frozenset[str]] = frozenset({"reward gradient"})
    follows_reward: ClassVar[bool] = True
    of: ClassVar[type] = TextGeneration
    unread: ClassVar[frozenset[str]] = frozenset({"step_weight", "reduction", "kl", "reference", "draws", "spread",
                                                  "redraw", "expansion", "value", "progress", "rehearsal",
                                                  "data", "distil", "replay"})
    takes: ClassVar[dict[str, type]] = {"surrogate": surrogates.RewardAscent, "log_ratio": ratios.PlainRatio,
                                        "decoding": Unmasking}

    def validate(self, rollout: Rollout, credit: Credit, loss: Loss, explorations: Sequence[RolloutSpec],
                 group: int) -> None:
        _require_samples(rollout, loss, group)
        decoding = rollout.decoding
        assert isinstance(decoding, Unmasking), "the only kind that fits"
        fits = {"order: random": decoding.order == "random", "shrink: 1": decoding.shrink == 1,
                "greedy: 0": not decoding.greedy,
                "top_p: 1, top_k: 0, min_p: 0": (decoding.top_p, decoding.top_k, decoding.min_p) == (1, 0, 0)}
        if wrong := [cure for cure, fit in fits.items() if not fit]:
            raise ValueError("a process whose KL is known chooses places by lot and cuts no token: set parts.decoding: "
                             f"{{{', '.join(wrong)}}}")


def _require_samples(rollout: Rollout, loss: Loss, group: int) -> None:
    if loss.reads_means:
        raise ValueError("a part reads means of transitions, which tokens have none of: use SampledKL and Clip")
    if rollout.decoding.greedy + rollout.decoding.expert >= group:
        given = {"greedy samples": rollout.decoding.greedy, "answers": rollout.decoding.expert}
        reserved = " and ".join(f"{count} {what}" for what, count in given.items() if count)
        raise ValueError(f"{reserved} leave none of the group to train")
