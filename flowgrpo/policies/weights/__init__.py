"""Weights of a policy: adapters, sharding, compilation, checkpointing, memory options."""
