"""Starters: small models that ship with the package, for images, clips and texts, with their worlds and prompts.

This module has the few numbers of their model cards that callers need, by the name that `model` takes.
"""

from pathlib import Path

CALL = {"max_sequence_length": 1}  # it has no T5, and the pipeline pads with that many zero tokens
EVAL_STEPS = 20
EVAL_GUIDANCE = 1.0  # the starter was distilled from itself under guidance
VIDEO_GUIDANCE = 4.0
VIDEO_CALL = {"height": 64, "width": 64, "num_frames": 5, "max_sequence_length": 8}

FOLDERS = {"starter": Path(__file__).parent / "model", "starter_video": Path(__file__).parent / "video",
           "starter_text": Path(__file__).parent / "text", "starter_consistency": Path(__file__).parent / "model",
           "starter_unified": Path(__file__).parent / "unified"}
# A LoRA and a scheduler that turn the folder's model into another.
MERGED = {"starter_consistency": Path(__file__).parent / "consistency"}
SCENES = ("starter", "starter_consistency")  # models of scenes of flat shapes
RATES = {"starter_video": 5.0}  # frames per second
CALLS = {"starter": CALL, "starter_video": VIDEO_CALL, "starter_consistency": CALL}
EVAL = {"starter": {"num_inference_steps": EVAL_STEPS, "guidance": EVAL_GUIDANCE},
        "starter_video": {"num_inference_steps": EVAL_STEPS, "guidance": VIDEO_GUIDANCE},
        "starter_consistency": {"num_inference_steps": 4, "guidance": 1.0}}
TOKEN_GUIDANCE = {"starter_unified": 1.0}  # of image tokens
