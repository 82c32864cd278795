"""VideoReward."""
