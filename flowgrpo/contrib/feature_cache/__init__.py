"""Feature caches of diffusers in the rollouts of methods that read final samples alone: `rollout.cache`."""
