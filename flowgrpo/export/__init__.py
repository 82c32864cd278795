"""Export of trained weights: ComfyUI, merged models, model cards."""
