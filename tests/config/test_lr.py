"""`train.lr`: a number, or the settings of a calibration."""

from flowgrpo import config
from flowgrpo.config.sections import AutoRate


def train(lr):
    return config.load(None, {"train.lr": lr}).train


def test_a_rate_is_a_number_or_found():
    assert train("1e-3").calibration is None and train("1e-3").first_lr == 1e-3
    assert train("auto").calibration == AutoRate() and train("auto").first_lr == AutoRate().start
    own = train("{start: 1e-5, target: 0.03}")
    assert own.calibration == AutoRate(start=1e-5, target=0.03) and own.first_lr == 1e-5


def test_the_default_is_a_number():
    assert config.Config().train.calibration is None and config.Config().train.first_lr == 3e-4
