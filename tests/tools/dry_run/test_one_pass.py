"""Dry runs with `train.one_pass`: the forwards that it saves, and the graphs that it keeps."""

import pytest

from flowgrpo.errors import UserError
from flowgrpo.gpus import GPUS
from flowgrpo.tools.dry_run import fit
from flowgrpo.tools.dry_run.estimate import dry_run
from tests.tools.dry_run.test_estimate import config, gpu, model  # noqa: F401 a fixture

OPTIONS = dict(method="flow_grpo", parts__kl__weight=0.0, train__prompts=4)


def test_an_update_costs_its_backwards_alone(model):  # noqa: F811
    plain, held = (dry_run(config(model, train__one_pass=one_pass, **OPTIONS)).phases for one_pass in (False, True))
    trained = plain["rollout"].flops * 5 / 6  # all steps but the last
    assert held["rollout"].flops == plain["rollout"].flops
    assert plain["update"].flops - held["update"].flops == pytest.approx(trained, rel=1e-6)
    assert 0 < held["update"].seconds < plain["update"].seconds
    assert min(held["update"].waits.values(), default=0) >= 0


def test_graphs_of_all_trained_states_are_kept_from_the_rollout_to_the_update(model):  # noqa: F811
    def more(**options):
        plain, held = (dry_run(config(model, train__one_pass=one_pass, **OPTIONS | options)).phases
                       for one_pass in (False, True))
        assert held["encode"].allocated == plain["encode"].allocated
        return {name: held[name].allocated - plain[name].allocated for name in ("rollout", "decode", "update")}
    one, two = more(train__prompts=4), more(train__prompts=8)
    graph = one["rollout"] - one["update"]  # of a micro-batch, which a replay has at a time
    assert one["rollout"] == one["decode"] == pytest.approx(4 * 5 * graph, rel=0.01)  # prompts, trained steps
    assert two["rollout"] == pytest.approx(2 * one["rollout"], rel=0.01)


@pytest.mark.parametrize("room, expected", [(1.2, True), (0.9, False)])
def test_auto_is_true_where_the_graphs_fit(model, room, expected):  # noqa: F811
    need = dry_run(config(model, train__one_pass=True, **OPTIONS)).peak
    settled = fit.settle(config(model, train__one_pass="auto", **OPTIONS), gpu(room * need))
    assert settled.train.one_pass is expected


def test_auto_is_false_where_it_does_not_go_with_the_run(model):  # noqa: F811
    settled = fit.settle(config(model, train__one_pass="auto", train__inner_epochs=2, **OPTIONS), GPUS["H100"])
    assert settled.train.one_pass is False
    with pytest.raises(UserError, match="train.one_pass is true, which does not go with train.inner_epochs 2"):
        dry_run(config(model, train__one_pass=True, train__inner_epochs=2, **OPTIONS))


def test_a_recipe_that_does_not_fit_is_told_to_replay(model):  # noqa: F811
    given = config(model, train__one_pass=True, **OPTIONS)
    whole = dry_run(given)
    settings, better = fit.nearest_settings(given, gpu(0.95 * whole.peak), whole)
    assert settings == {"train.one_pass": False} and better.peak < whole.peak
