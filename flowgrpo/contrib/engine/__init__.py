"""Rollouts of images and video by an SGLang-Diffusion server, over HTTP: `rollout.engine`, and `flowgrpo verify`."""
