"""What is trained: a policy draws samples and replays single decisions with gradients."""
