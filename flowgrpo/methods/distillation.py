"""Distribution matching: the gradient that draws a student's samples to a teacher's distribution.

A student G maps a state of its own few steps to data x0. Noised to a time t, x_t = (1-t) x0 + t eps (or sqrt(a) x0 +
sqrt(1-a) eps), the gradient of KL(student || teacher) is E[w (s_fake - s_real)(x_t) dx0/dtheta], with s_real the
teacher's score and s_fake that of the student's own distribution (DMD, 2311.18828). A second set of weights,
the fake score, learns it by the denoising loss on the student's samples. In predictions of the data, mu,
(1-t) (mu_fake - mu_real) / t^2 is the difference of scores; w makes it (mu_fake - mu_real) / mean|x0 - mu_real|
(as in DMD and DMD2, 2405.14867).
"""

from typing import Annotated, ClassVar, Literal

from torch import Tensor

from flowgrpo.methods.parts import Times
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.samplers.noised_finals import Stratified
from flowgrpo.types import wide

LEAST = 1e-5  # of the divisor of a sample's direction


def matching_direction(x0: Tensor, real: Tensor, fake: Tensor) -> Tensor:
    """(fake - real) / mean|x0 - real|, [B, *D], of the data predicted by teacher and fake score; along its negative
    the student approaches the teacher."""
    x0, real, fake = wide(x0, real, fake)
    size = (x0 - real).abs().flatten(1).mean(1).clamp(min=LEAST)
    return (fake - real) / size.view(-1, *[1] * (x0.ndim - 1))


def pull(x0: Tensor, direction: Tensor) -> Tensor:
    """A loss [B] whose gradient by x0 [B, *D] is direction / D, D the number of a sample's values."""
    (x0,) = wide(x0)
    return (x0 - (x0 - direction).detach()).square().flatten(1).mean(1) / 2


@part()
class Distillation:
    """A loss that draws a student of few steps to its base, the teacher, beside the method's own loss, which has
    weight 1.

    weight: of the loss.
    ascent: weight of the trained rewards themselves at the predicted data, of those that have a gradient, which the
        method's own steps follow (ReFL, as in DMDR's code).
    batch: samples per optimizer step, on all processes together.
    scale: the teacher's guidance; the student has the run's.
    updates: optimizer steps for each of the method's own; those after the first have this loss alone.
    lr_share: learning rate of the denoisers' LoRA, as a share of train.lr, which text encoders keep.
    after: epochs before this loss begins, of the reward alone. With text "student" it trains the text encoders then,
        and the denoisers' LoRA stays as it is.
    alone: epochs of this loss alone that come next; then both train.
    text: text encoders that the teacher reads where they are trained: the "base"'s, or the "student"'s, so that
        rewards change what is drawn and the teacher how.
    """

    consistent: ClassVar[bool] = False

    weight: Annotated[float, Above(0)] = 1.0
    ascent: Annotated[float, AtLeast(0)] = 0.0
    batch: Annotated[int, AtLeast(1)] = 32
    scale: Annotated[float, AtLeast(0)] = 1.0
    updates: Annotated[int, AtLeast(1)] = 1
    lr_share: Annotated[float, Above(0)] = 1.0
    after: Annotated[int, AtLeast(0)] = 0
    alone: Annotated[int, AtLeast(0)] = 0
    text: Literal["base", "student"] = "base"


@part("distil", target="steps")
class DistributionMatching(Distillation):
    """DMD2's loss (2405.14867): `pull` along `matching_direction`, on data that the student predicts at `batch` states
    of its own rollout.

    times: when they are noised, one after the other; DMD2 draws them evenly from 0.02 to 0.98.
    fake_updates: steps of the fake score before each optimizer step (DMD2's two time scales: 5).
    fake_lr: its learning rate. Its guidance is the student's.
    blend: share of the fake score in the teacher's weights, falling to 0 over `blend_updates` optimizer steps (DMDR's
        dynamic guidance, 2511.13649: the distributions overlap from the start).
    """

    times: Times = Stratified(8, 0.02, 0.98)
    fake_updates: Annotated[int, AtLeast(1)] = 5
    fake_lr: Annotated[float, Above(0)] = 1e-3
    blend: Annotated[float, AtLeast(0, to=1)] = 0.0
    blend_updates: Annotated[int, AtLeast(1)] = 1000


@part("distil", target="steps")
class RewardedMatching(DistributionMatching):
    """DistributionMatching with a learned reward (TDM-R1, 2603.07700): a surrogate, one more set of LoRA values, is
    trained by DGPO's group preference on the noised samples; its difference to the base is the reward's direction.

    The surrogate's loss is W A e, W = sigmoid(beta * mean over the group of A (e - e_base)), e the squared error at a
    noised sample. The method's own loss is left out. The clips of the paper's code are too.

    reward: weight of `matching_direction(x0, surrogate, base)`; the teacher's direction has 1.
    beta: of the preference, on mean errors.
    surrogate_lr: learning rate of the surrogate, which takes one step before each optimizer step.
    """

    reward: Annotated[float, AtLeast(0)] = 1.0
    beta: Annotated[float, Above(0)] = 100.0
    surrogate_lr: Annotated[float, Above(0)] = 1e-3


def preference_weights(advantage: Tensor, error: Tensor, base: Tensor, beta: float) -> Tensor:
    """W of each group of the errors [N, G] of a surrogate and of the base: [N, 1] (DGPO, 2510.08425)."""
    return (beta * (advantage * (error - base)).mean(1, keepdim=True)).sigmoid()


@part("distil", target="steps", consistent=True)
class ConsistencyDistillation(Distillation):
    """Latent consistency distillation (2310.04378) on the run's own samples, of a flow model: Huber's loss of
    `consistency_target` on samples noised to times of (0, 1], one in eleven at 1.

    jumps: N, steps of the teacher from noise to data.
    decay: of the average of the student's weights that says the target; from 1/10 in the first steps on.
    delta: of Huber's loss, in velocities.
    """

    jumps: Annotated[int, AtLeast(2)] = 10
    decay: Annotated[float, AtLeast(0, to=1)] = 0.95
    delta: Annotated[float, Above(0)] = 0.25


def consistency_target(v: Tensor, u: Tensor, s: float | Tensor, after: float | Tensor) -> Tensor:
    """The student's velocity at the times s, [B, *D], by which it says the data that the average says at time `after`.

    With f(x, s) = x - s u(x, s), the teacher's step x - (s - after) v and the average's velocity u there:
    f = x - (s - after) v - after u, so that the target is ((s - after) v + after u) / s.
    """
    v, u = wide(v, u)
    return ((s - after) * v + after * u) / s
