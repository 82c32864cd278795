import json,sys
sys.path.insert(0,'scripts')
def row(name,file,steps,label):
    r=[x for x in json.load(open(file))['rows'] if x['steps']==steps][0]['accuracy']['pass@1']
    return f"| {name} | {label} | {steps} | "+" | ".join(f"{r[k]:.3f}" for k in ("single","colours","counting","two","position","attribution","all"))+" |"
rows="\n".join([row("consistency","runs/next/cons.json",4,"LCM"),row("starter","runs/next/euler4.json",4,"Euler"),row("starter","runs/next/card_plain1.json",20,"Euler")])
size=__import__("os").path.getsize("flowgrpo/starter/consistency/pytorch_lora_weights.safetensors")/1e6
open('flowgrpo/starter/consistency/README.md','w').write(f'''---
license: apache-2.0
pipeline_tag: text-to-image
---
# The consistency starter

The starter (`../model`) as a consistency model: a LoRA of rank 12 on all linear layers of its denoiser ({size:.1f} MB) and a
`FlowMatchLCMScheduler`, with which the stock `StableDiffusion3Pipeline` draws in four evaluations. flowgrpo knows it as
`starter_consistency`.

**Training.** `python scripts/build_starter_consistency.py`: consistency distillation (LCM, 2310.04378) in the velocity's
form, 60 steps of 32 of 1,000 drawn scenes, one Euler step of 1/10 of the starter as teacher, targets from an average of
the weights (decay 0.95), Huber's loss, AdamW at 3e-3 falling to 0 over the last half, bf16 autocast. About a minute of
one CPU core. Loss and pictures would still gain from more (`--steps`, `--scenes`).

**Use.** Its scheduler puts four steps at sigma 1, 0.75, 0.5 and 0.25:

```python
pipe = StableDiffusion3Pipeline.from_pretrained("flowgrpo/starter/model", text_encoder_3=None, tokenizer_3=None)
pipe.load_lora_weights("flowgrpo/starter/consistency")
pipe.scheduler = FlowMatchLCMScheduler.from_pretrained("flowgrpo/starter/consistency", subfolder="scheduler")
pipe("three red stars", num_inference_steps=4, guidance_scale=1.0, max_sequence_length=1)
```

This pipeline hands its generator to the noise that a picture starts with and not to the scheduler, whose noise is
torch's own: seed it (`torch.manual_seed`). `flowgrpo` hands it on.

**Evaluation sampler:** its own scheduler, 4 steps, guidance 1. Strict accuracy on `held_out.jsonl`, 40 prompts per task,
one picture each (240 pictures: a standard error of 0.03 on "all"):

| model | scheduler | steps | single | colours | counting | two | position | attribution | all |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|
{rows}

(`python scripts/evaluate_starter.py starter_consistency --steps 4 --guidance 1 --precision bf16 --micro-batch 240`; for
the last two `starter` in its place, with `--steps 4` and `--steps 20`.)

**Limits.** The starter's, and less detail.
''')
