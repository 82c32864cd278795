"""Language models: policies, samplers, rollouts, rewards, losses and presets. An image run imports none of it."""
