"""Text encoders in the graph: what is trained, what is encoded anew, and files that stock diffusers reads."""

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo import methods
from flowgrpo.config import Config
from flowgrpo.config.sections import Adapter
from flowgrpo.errors import UserError
from flowgrpo.methods import overlay
from flowgrpo.methods.groups import Adapted
from flowgrpo.policies.loading import load_branches, load_tuned
from flowgrpo.policies.pipelines.load import trainable_modules
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.weights.adapters import merge
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.samplers.grids import shift_grid
from flowgrpo.tools.check import report
from tests.helpers import tiny
from tests.helpers.refusals import message

ALONE, BOTH = Adapted(denoisers=False, encoders=True), Adapted(denoisers=True, encoders=True)
PIPES = {"sd3": tiny.sd3, "sd15": tiny.sd15, "flux": tiny.flux}
HOST = {"sd3": "flow_grpo_fast+texforce", "sd15": "ddpo+texforce", "flux": "flow_grpo+texforce"}


def policy(pipe, adapted=ALONE, **options) -> PipelinePolicy:
    return PipelinePolicy(pipe, Adapter(rank=2), **{"call": tiny.call_of(pipe), "adapted": adapted} | options)


def trainer(name: str, adapted=ALONE, **options):
    torch.manual_seed(0)
    made = tiny.trainer(policy(PIPES[name](), adapted), method=HOST[name], train__guidance=1.0,
                        parts__adapted__denoisers=adapted.denoisers, **options)
    tiny.stir(made.policy)
    return made


def test_a_recipe_that_trains_the_text_encoder_is_told_of_that():
    told = report.report("StableDiffusionPipeline", Config(method=HOST["sd15"], precision="fp32", adapter={"rank": 4}))
    pipe = tiny.sd15()
    trained = PipelinePolicy(pipe, Adapter(rank=4), adapted=ALONE)
    assert told["supported"] and told["lora_parameters"] == sum(p.numel() for p in trained.weights.parameters())
    assert told["lora_targets"] == ["q_proj", "k_proj", "v_proj", "out_proj"]  # a CLIP's
    assert told["lora_loader"] == ["load_lora_weights"]
    assert told["parameters"] == sum(p.numel() for p in pipe.unet.parameters())
    told = report.report("StableDiffusion3Pipeline", Config(method=HOST["sd3"], precision="fp32",
                                                            memory={"encoders": "cpu"}))
    assert not told["supported"] and told["reason"].startswith("text encoders are trained ")


def test_the_gradient_is_that_of_a_small_step():
    """Through encoders and denoiser, against central differences."""
    made = policy(tiny.sd3().to(torch.float32))
    tiny.stir(made)
    x = torch.randn(2, *tiny.LATENTS, generator=torch.Generator().manual_seed(2))
    conditioning, grid = made.encode(["red", "blue"]), shift_grid(4, 3.0)
    def value() -> torch.Tensor:
        return made.replay(conditioning, x, grid, 1).square().mean()
    value().backward()
    parameters = made.weights.parameters()
    direction = [p.grad / torch.cat([q.grad.flatten() for q in parameters]).norm() for p in parameters]
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, direction)).item()
    sides = []
    for sign in (1, -1):
        moved = {key: p.detach() + sign * 1e-2 * d for (key, p), d in zip(made.weights.named.items(), direction)}
        with torch.no_grad(), made.weights.swap(moved):
            sides.append(value().item())
    assert (sides[0] - sides[1]) / 2e-2 == pytest.approx(slope, rel=0.02) and slope > 1e-4


def test_rollouts_decoding_and_evaluation_read_the_present_encoders():
    made = policy(tiny.sd3())
    conditioning = made.encode(["red", "blue"])
    x, grid = torch.ones(2, *tiny.LATENTS), shift_grid(4, 3.0)
    def seen() -> list[torch.Tensor]:
        with torch.no_grad():
            return [made.replay(conditioning, x, grid, 1), made.generate(conditioning, made.generators([1, 2]), 2, 3.0)]
    base = seen()
    tiny.stir(made, 0.3)
    tuned = seen()
    assert all((one - two).abs().max() > 1e-2 for one, two in zip(base, tuned))
    with made.reference():
        assert all(map(torch.equal, seen(), base))
    with made.rl_guidance(0):
        assert all(map(torch.equal, seen(), base))
    with made.rl_guidance(1):
        assert all(map(torch.equal, seen(), tuned))
    with pytest.raises(UserError, match="RLG with weight 1.5.*expected 0 or 1"), made.rl_guidance(1.5):
        pass
    with torch.no_grad():  # nothing is read of the prompts where no step is left
        assert torch.equal(made.decode(x, conditioning), made.decode(x, conditioning))


def test_encoded_prompts_are_not_kept_on_disk(tmp_path):
    assert trainer("sd3", cache=str(tmp_path)).rollouts.encode.folder is None
    assert tiny.trainer(cache=str(tmp_path)).rollouts.encode.folder.parent == tmp_path


def test_a_prompt_is_encoded_once_whatever_its_rows():
    made, calls = policy(tiny.sd3()), []
    made.pipe.text_encoder.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    conditioning = made.encode(["red", "blue"]).rows(torch.tensor([1, 0, 1, 1]))
    calls.clear()
    x = torch.randn(4, *tiny.LATENTS, generator=torch.Generator().manual_seed(2))
    rows = made.replay(conditioning, x, shift_grid(4, 3.0), 1)
    assert calls == [1] * 4  # of two prompts, each beside its negative one
    alone = made.replay(conditioning.rows(torch.tensor([1])), x[1:2], shift_grid(4, 3.0), 1)
    torch.testing.assert_close(rows[1:2], alone, rtol=0, atol=1e-5)


# --- files -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PIPES)
@pytest.mark.parametrize("adapted", [ALONE, BOTH], ids=["alone", "both"])
def test_stock_diffusers_loads_the_adapters_and_draws_the_same(name, adapted, tmp_path):
    made = tiny.stir(policy(PIPES[name](), adapted), 0.3)
    kept = made.weights.snapshot()
    said = made.weights.save(tmp_path)
    assert "same scale" in said and all(torch.equal(kept[key], p) and p.requires_grad
                                        for key, p in made.weights.named.items())
    keys = {key.split(".")[0] for key in load_file(tmp_path / LORA_FILE)}
    denoiser = {"unet" if name == "sd15" else "transformer"} if adapted.denoisers else set()
    assert keys == {"text_encoder"} | denoiser | ({"text_encoder_2"} if name == "sd3" else set())
    ours = made.generate(made.encode(["red", "blue"]), made.generators([1, 2]), 3, 2.5, "latent")
    stock = PIPES[name]()
    def latents():
        return stock(["red", "blue"], num_inference_steps=3, guidance_scale=2.5, output_type="latent",
                     generator=PipelinePolicy.generators([1, 2]), **tiny.call_of(stock)).images
    untuned = latents()
    if name == "flux":  # whose T5 has no loader in diffusers
        load_tuned(stock, tmp_path)
        assert (tmp_path / "text_encoder_2" / "adapter_config.json").is_file()
    else:
        stock.load_lora_weights(tmp_path)
    torch.testing.assert_close(latents(), ours, rtol=0, atol=1e-4)
    assert (untuned - ours).abs().max() > 0.05


@pytest.mark.parametrize("pipe", [tiny.sd3, tiny.flux])
def test_adapters_can_be_merged_into_the_encoders(pipe, tmp_path):
    made = tiny.stir(policy(pipe()), 0.3)
    made.weights.save(tmp_path / "lora")
    ours = made.generate(made.encode(["red"]), made.generators([1]), 2, 2.5, "latent")
    stock = pipe()
    load_tuned(stock, tmp_path / "lora")
    for name in ("text_encoder", "text_encoder_2"):
        merge(getattr(stock, name))
        getattr(stock, name).save_pretrained(tmp_path / name)
    again = pipe()
    for name in ("text_encoder", "text_encoder_2"):
        setattr(again, name, type(getattr(again, name)).from_pretrained(tmp_path / name))
    found = again("red", num_inference_steps=2, guidance_scale=2.5, output_type="latent",
                  generator=made.generators([1]), **tiny.call_of(again)).images
    torch.testing.assert_close(found, ours, rtol=0, atol=1e-4)


def test_rlg_takes_the_weights_0_and_1(tmp_path):
    made = tiny.stir(policy(tiny.sd3()), 0.3)
    made.weights.save(tmp_path)
    stock = tiny.sd3()
    def drawn():
        return stock(["red"], num_inference_steps=2, guidance_scale=2.5, output_type="latent",
                     generator=PipelinePolicy.generators([1]), **tiny.call_of(stock)).images
    base = drawn()
    branches = load_branches(stock, tmp_path)
    with branches.at(0):
        assert torch.equal(drawn(), base)
    with branches.at(1):
        assert not torch.equal(drawn(), base)
    with pytest.raises(UserError, match="RLG with weight 2: the text_encoder"), branches.at(2):
        pass


def test_half_precision_keeps_its_adapters_in_full(tmp_path):
    made = tiny.stir(policy(tiny.sd3().to(torch.bfloat16), precision="bf16"))
    kept = made.weights.snapshot()
    made.weights.save(tmp_path)
    assert all(p.dtype == torch.float32 and torch.equal(p, kept[key]) for key, p in made.weights.named.items())
    assert all(value.dtype == torch.float32 for value in load_file(tmp_path / LORA_FILE).values())


# --- mistakes --------------------------------------------------------------------------------------------------------
def test_the_preset_changes_what_is_trained_and_nothing_else():
    assert methods.preset("ddpo+texforce") == methods.preset("ddpo").having(adapted=ALONE)
    both = overlay.with_parts(methods.preset("ddpo+texforce"), {"adapted": {"denoisers": True}})
    assert both.rollout.adapted == BOTH and methods.preset("ddpo").parts()["adapted"] == Adapted()


def test_something_has_to_be_trained():
    none = {"adapted": {"encoders": False}}
    assert "denoisers and encoders are both false" in message(overlay.with_parts, methods.preset("texforce"), none)
    pipe = tiny.sd3()
    pipe.text_encoder = pipe.text_encoder_2 = None
    assert "StableDiffusion3Pipeline has no text encoder to be trained" in message(trainable_modules, pipe, ALONE)
    with pytest.raises(UserError, match="adapter.encoder_targets.*match no module of the text_encoder"):
        PipelinePolicy(tiny.sd3(), Adapter(rank=2, encoder_targets=["nothing"]), adapted=ALONE)
