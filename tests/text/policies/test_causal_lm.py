"""A language model as a policy: completions, their densities, what a group shares, its files, and a teacher."""

from functools import partial

import pytest
import torch

from flowgrpo.config.sections import Text
from flowgrpo.methods import preset
from flowgrpo.methods.validate import resolve
from flowgrpo.objectives.kl import at_epoch, k2
from flowgrpo.objectives.references import Teacher
from flowgrpo.policies import build
from flowgrpo.policies.weights.checkpointing import recompute
from flowgrpo.text.policies.causal_lm import RECOMPUTED, CausalLM, relative_error
from flowgrpo.text.rewards.answer_keys import strip_thoughts
from flowgrpo.text.samplers.decoding import Decoding
from flowgrpo.training import sampling
from flowgrpo.types import RunState
from tests.helpers import loop, tiny_masked, tiny_vision
from tests.helpers import tiny as tiny_images
from tests.helpers import tiny_text as tiny
from tests.helpers.refusals import error_line, message, refused
from tests.helpers.tables import close
from tests.helpers.tiny_text import ASKED, replayed, sampled


def by_hand(own: CausalLM, asked, found, decoding=Decoding()) -> torch.Tensor:
    """Row by row and without padding, from the model's own logits."""
    rows = torch.zeros(found.ids.shape)
    for row, (prompt, ids) in enumerate(zip(asked.ids, found.ids)):
        count = int(found.mask[row].sum())
        logits = own.model(input_ids=torch.cat([prompt, ids[:count]])[None]).logits[0, len(prompt) - 1:-1]
        rows[row, :count] = decoding(logits).gather(1, ids[:count, None])[:, 0]
    return rows


# --- samples ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("decoding", [Decoding(), Decoding(0.7), Decoding(1.3, top_p=0.9, top_k=8, min_p=0.02)])
@pytest.mark.parametrize("shared", [True, False])
def test_a_replay_gives_the_log_probabilities_of_the_rollout_which_are_the_models_own(decoding, shared):
    own = tiny.stir(tiny.policy(shared_prefix=shared))
    asked, found = sampled(own, decoding=decoding)
    again = replayed(own, asked, found, decoding)
    torch.testing.assert_close(again.logp, found.logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(again.logp, by_hand(own, asked, found, decoding), rtol=0, atol=1e-5)
    assert torch.equal(again.mask, found.mask) and not again.logp[~found.mask].any()


def test_draws_follow_the_model():
    own, count = tiny.policy(max_tokens=1), 4000
    asked, found = sampled(own, ["1+2="] * count, range(count))
    expected = own.model(input_ids=asked.ids[0][None]).logits[0, -1].softmax(-1).detach()
    shares = torch.bincount(found.ids[:, 0], minlength=len(expected)) / count
    assert ((shares - expected).abs() <= 4 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()


def test_greedy_rows_are_those_of_generate_without_penalties():
    own = tiny.policy()
    asked, found = sampled(own, greedy=2)
    for row in range(2):
        ids = asked.ids[row][None]
        stock = own.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6,
                                   do_sample=False)[0, ids.shape[1]:]
        assert torch.equal(found.ids[row][:len(stock)], stock)
    assert own.generate(asked.rows(torch.arange(2)), own.generators([0, 0])) == found.texts[:2]
    loaded = tiny.model()
    loaded[0].generation_config.repetition_penalty = 5.0
    loaded[0].generation_config.temperature = 0.1
    _, plain = sampled(tiny.policy())
    _, found = sampled(tiny.policy(loaded))
    assert torch.equal(plain.ids, found.ids)


# Ids of the tiny tokenizer: 2 is </s>, 15 stands for ChatML's <|im_end|>; a template that writes it behind a turn.
CHATML = "{% for message in messages %}{{ message['content'] }}=\n{% endfor %}"


@pytest.mark.parametrize("tokenizers, configs, template, kept", [
    ("</s>", 2, None, [2]), ("</s>", None, None, [2]), (None, 2, None, [2]), (None, [2, 5], None, [2, 5]),
    ("=", 2, None, [15, 2]),  # a fine-tune that changed its tokenizer alone (TRL#7039)
    ("</s>", 15, None, [2, 15]), ("</s>", [15, 2], None, [2, 15]), ("=", [2, 5], None, [15, 2, 5]),
    ("</s>", [2, 15], CHATML, [15, 2]),  # as of Gemma, whose template ends a turn by another token than the tokenizer
    ("</s>", 2, CHATML, [2])])
def test_either_end_of_a_turn_ends_a_completion(tokenizers, configs, template, kept):
    loaded = tiny.model()
    assert loaded[1]("=", add_special_tokens=False)["input_ids"] == [15]
    loaded[1].eos_token, loaded[1].chat_template = tokenizers, template or loaded[1].chat_template
    loaded[0].generation_config.eos_token_id = configs
    own = tiny.policy(loaded, max_tokens=24)
    assert own.ends == kept
    assert template is None or tiny.policy(tiny.model(), template=False).ends == [2]
    _, found = sampled(own, ["1+2="] * 64, range(64))
    ended = set()
    for row, mask, cut, text in zip(found.ids.tolist(), found.mask, found.cut, found.texts):
        first = next((place for place, token in enumerate(row) if token in kept), None)
        assert mask.sum() == (24 if first is None else first + 1) and cut == (first is None)
        assert text.count("=") == (0 if 15 in kept else row.count(15)) and text.tokens == mask.sum()
        ended |= set() if first is None else {row[first]}
    assert ended == set(kept)  # every one is seen


# --- replays ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("checkpointing", [False, True])
def test_rows_of_one_prompt_read_it_once_when_they_are_sampled(checkpointing):
    """2 prompts of 6 and 5 tokens are read but for the last one of 6; then 6 rows make steps of one token."""
    found, counts = [], []
    for shared in (True, False):
        own = tiny.stir(tiny.policy(shared_prefix=shared, checkpointing=checkpointing))
        sampled(own)  # the trial
        before = own.evaluations
        found.append(sampled(own, [ASKED[2]] * 3 + [ASKED[0]] * 3, range(6))[1])
        counts.append(own.evaluations - before)
    once, each = found
    assert torch.equal(once.ids, each.ids) and once.texts == each.texts
    torch.testing.assert_close(once.logp, each.logp, rtol=0, atol=1e-5)
    steps = int(once.mask.sum(1).max())
    assert counts == [2 * 5 + 6 * steps, 6 * (6 + steps - 1)]


def test_logits_that_are_more_than_the_heads_are_taken_whole():
    from transformers import Gemma2Config, Gemma2ForCausalLM
    _, tokenizer = tiny.model()
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3,
        final_logit_softcapping=1.5, sliding_window=32, attn_implementation="eager",
        pad_token_id=0, bos_token_id=1, eos_token_id=2))
    own = tiny.policy((model, tokenizer))
    asked, found = sampled(own)
    assert not own.head_alone(asked)
    torch.testing.assert_close(replayed(own, asked, found).logp, by_hand(own, asked, found), rtol=0, atol=1e-5)
    torch.testing.assert_close(replayed(own, asked, found).logp, found.logp, rtol=0, atol=1e-5)


def test_prompts_are_shared_in_half_precision_whatever_the_first_one_is():
    """States of scale 45, as a published model has them, differ by more than 0.1 where a kernel rounds otherwise."""
    model, tokenizer = tiny.model(layers=12)
    with torch.no_grad():
        model.model.norm.weight.mul_(45)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight / 45)
    asked = ["1;" * count + "3=" for count in range(1, 24)]
    found = [CausalLM(model.to(torch.bfloat16), tokenizer, None, Text(max_tokens=6), precision="bf16") for _ in asked]
    assert {prompt: own.reason_not_shared(own.encode([prompt])) for prompt,
            own in zip(asked, found)} == dict.fromkeys(asked, "")


def test_the_error_of_logits_by_hand():
    """Logits [1,2,3] have the spread sqrt(2); a constant added to all changes no probability."""
    other = torch.tensor([[1.0, 2.0, 3.0]])
    assert relative_error(other + 7, other) == 0
    assert relative_error(other * 1.5, other) == pytest.approx(0.5)
    assert relative_error(other + torch.tensor([[0.1, -0.2, 0.1]]), other) == pytest.approx((0.06 / 2) ** 0.5)
    assert relative_error(torch.zeros(1, 3), torch.zeros(1, 3)) == 0


def test_a_trial_is_made_once_in_a_run():
    first, last = tiny.policy(), tiny.policy()
    assert first.reason_not_shared(first.encode(ASKED)) == ""
    assert first.state() == ({}, {"apart": ""})
    last.load_state({}, {"apart": "it was not so"})
    assert last.reason_not_shared(last.encode(ASKED)) == "it was not so"
    last.load_state({}, {})
    assert not last.reason_not_shared(last.encode(ASKED))
    recomputing = tiny.policy(checkpointing=True)
    recomputing.load_state({}, {"apart": ""})
    assert recomputing.reason_not_shared(recomputing.encode(ASKED)) == RECOMPUTED
    last.load_state({}, {"apart": RECOMPUTED})  # of a run with gradient checkpointing, which this one has not
    assert not last.reason_not_shared(last.encode(ASKED))


def test_checkpointing_reads_whole_rows_and_gives_the_same_gradient():
    gradients, calls = [], []
    for checkpointing in (False, True):
        own = tiny.stir(tiny.policy(checkpointing=checkpointing))
        asked, found = sampled(own, [ASKED[0]] * 3, range(3))
        assert bool(own.reason_not_shared(asked)) is checkpointing
        calls.append(0)
        for module in own.model.modules():
            if type(module).__name__.endswith("MLP"):
                module.register_forward_pre_hook(lambda *_: calls.__setitem__(-1, calls[-1] + 1))
        new = replayed(own, own.encode(ASKED[:1]), found, prompts=torch.zeros(3, dtype=torch.int64))
        before = calls[-1]
        new.logp.sum().backward()
        calls[-1] -= before
        gradients.append([parameter.grad for parameter in own.weights.parameters()])
    assert calls[0] == 0 and calls[1] == own.model.config.num_hidden_layers  # each layer once more, in the backward
    for one, other in zip(*gradients):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_refusals_of_language_models():
    assert "train.checkpointing is on, but Linear has no layers" in message(lambda: recompute(torch.nn.Linear(1, 1)))
    model, tokenizer = tiny.model()
    assert "takes no image" in message(lambda: tiny.policy().encode(["1+2="], images=["picture.png"]))
    tokenizer.chat_template = None
    assert "no chat template" in message(lambda: tiny.policy((model, tokenizer), template=True).encode(["1+2="]))
    assert "precision is 'bf16'" in message(CausalLM, *tiny.model(), None, tiny.Text(), precision="bf16")


@pytest.mark.parametrize("made", [tiny.policy, tiny_masked.policy, partial(tiny_vision.policy, "llava")])
@pytest.mark.parametrize("end, tag", [("<think>\n", "<think>"), ("<|assistant|>", ""),
                                      ("<think>\n\n</think>\n\n", "")])
def test_completions_carry_the_tag_that_a_chat_template_ends_with(made, end, tag):
    own = made()
    getattr(own, "processor", own.tokenizer).chat_template += "{{ '" + end.replace("\n", "\\n") + "' }}"
    asked = own.encode(ASKED)
    drawn = own.sample(asked, own.plain, own.generators(range(4)), torch.zeros(4, dtype=torch.bool)).texts
    assert [text.opened for text in [*drawn, *own.generate(asked, own.generators(range(4)))]] == [tag] * 8
    own.text = own.text.model_copy(update={"template": False})  # the prompt itself is all that the model reads
    assert own.opened(["1+<think>", "<think>1+"]) == ["<think>", ""]


def test_a_run_pays_no_thought_that_its_template_opens():
    def scores(end: str) -> torch.Tensor:
        own = tiny.policy()
        own.tokenizer.chat_template += end
        trainer = tiny.trainer(own, {"any": lambda texts, prompts: [
            float(bool(strip_thoughts(text))) for text in texts]}, text__template=True)
        return loop.draw(trainer).groups.totals
    assert scores("").sum() > 0 and not scores("<think>").any()


def test_the_reference_is_the_base_and_prompts_have_their_template():
    own, base = tiny.stir(tiny.policy()), tiny.policy()
    asked, found = sampled(base)
    with own.reference():
        without = replayed(own, asked, found).logp
    assert torch.equal(without, replayed(base, asked, found).logp)
    assert (replayed(own, asked, found).logp - without).abs().max() > 0.01
    own, tokenizer = tiny.policy(), tiny.model()[1]
    ids = tokenizer("<s>1+2=", add_special_tokens=False)["input_ids"]
    assert own.encode(["1+2="]).ids[0].tolist() == ids and ids[0] == tokenizer.bos_token_id
    assert tiny.policy(template=False).encode(["1+2="]).ids[0].tolist() == ids[1:]
    assert tiny.policy(system="7=").encode(["1+2="]).ids[0].tolist() == \
        tokenizer("<s>7=1+2=", add_special_tokens=False)["input_ids"]


# --- prompts ---------------------------------------------------------------------------------------------------------
def test_the_kind_of_a_model_is_told_by_its_files(tmp_path):
    tiny.save(tmp_path / "lm", tiny.model())
    (tmp_path / "pipe").mkdir()
    (tmp_path / "pipe" / "model_index.json").write_text("{}")
    (tmp_path / "neither").mkdir()
    found = {name: build.kind(tiny.config(model=str(tmp_path / name))) for name in ("lm", "pipe")}
    assert found == {"lm": build.CAUSAL_LM, "pipe": build.PIPELINE}
    assert build.kind(tiny.config(model="starter")) == build.PIPELINE
    assert "neither a model_index.json" in message(lambda: build.kind(tiny.config(model=str(tmp_path / "neither"))))
    # Of a hub id, which is not asked for its files, the method says it.
    assert build.kind(tiny.config(model="some/model", method="grpo")) == build.CAUSAL_LM
    assert build.kind(tiny.config(model="some/model", method="mix_grpo+grpo_guard")) == build.PIPELINE


@pytest.mark.parametrize("option, told", [({"memory__weights": "int8"}, "memory.weights is set"),
                                          ({"train__compile": True}, "train.compile is set"),
                                          ({"image__height": 64}, "image.height is set")])
def test_options_of_denoisers_are_refused(option, told):
    assert told in message(build.make_policy, tiny.config(**option), "cpu", tiny.model())


# --- files -----------------------------------------------------------------------------------------------------------
def test_the_adapter_loads_in_stock_peft_and_changes_the_output_identically(tmp_path):
    from peft import PeftModel
    own = CausalLM(*tiny.model(), tiny.Adapter(rank=2, alpha=7.0), tiny.Text(max_tokens=6))
    tiny.stir(own)
    own.weights.save(tmp_path)
    asked, found = sampled(own)
    ids = asked.ids[0][None]
    ours = own.model(input_ids=ids).logits
    stock = PeftModel.from_pretrained(tiny.model()[0].eval(), tmp_path)(input_ids=ids).logits
    torch.testing.assert_close(stock, ours, rtol=0, atol=4e-6)  # the scale of 3.5 is in B: it is rounded elsewhere
    assert (tiny.model()[0].eval()(input_ids=ids).logits - ours).abs().max() > 0.01
    torch.testing.assert_close(replayed(own, asked, found).logp, found.logp, rtol=0, atol=1e-5)  # none is left behind


def test_the_adapter_is_saved_with_the_same_bytes(tmp_path):
    """peft writes the names of its targets in the order of a set, which is another in every process."""
    own = CausalLM(*tiny.model(), tiny.Adapter(rank=2), tiny.Text(max_tokens=6))
    config, saved = own.model.peft_config["default"], set()
    names = sorted(config.target_modules)
    for folder, order in ((tmp_path / "one", names), (tmp_path / "two", names[::-1])):
        config.target_modules = order
        own.weights.save(folder)
        saved.add(tuple((folder / f"adapter_{name}").read_bytes() for name in ("config.json", "model.safetensors")))
    assert len(names) > 1 and len(saved) == 1


# --- the command line ------------------------------------------------------------------------------------------------
def test_texts_from_a_finished_run_on_the_command_line(tmp_path, capsys):
    from flowgrpo.cli import main
    from flowgrpo.run import run
    from flowgrpo.text.policies.text_weights import load_causal_lm
    settings = tiny.files_of_a_run(tmp_path, tiny.model(), train__lr=0.05, train__epochs=12,
                                   parts={"kl": {"weight": 0.0}})
    run(settings)
    own = CausalLM(*load_causal_lm(settings.model), None, tiny.Text(max_tokens=6))
    capsys.readouterr()
    base = own.generate(own.encode(["1+2=", "7+8="]), own.generators([0, 0]))
    asked = ["sample", settings.model, "--prompt", "1+2=", "--prompt", "7+8="]
    assert main(asked) == 0
    said = capsys.readouterr().out.splitlines()  # up to 256 tokens, of which these are the first
    assert len(said) == 2 and all(text.startswith(start) for text, start in zip(said, base))
    assert main([*asked, "--lora", str(settings.folder)]) == 0
    tuned = capsys.readouterr().out.splitlines()
    assert all(len(text) < 3 for text in tuned) and all(len(text) > 3 for text in base)
    assert main(["compare", "grid", str(settings.folder), "--count", "2"]) == 0
    assert (settings.folder / "grid.png").is_file()
    assert "adapter_config.json is missing" in error_line(capsys, *asked, "--lora", tmp_path)


def teacher(folder, extra=()) -> str:
    """The tiny model with other weights where a LoRA has its own, saved."""
    model, tokenizer = tiny.model()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    tokenizer.add_tokens(list(extra))
    return str(tiny.save(folder, (model, tokenizer)))


def trainer(folder, rewards=None, **options):
    parts = {"reference": {"model": str(folder)}, **options.pop("parts", {})}
    return tiny.trainer(rewards=rewards, method="kdrl", parts=parts, **options)


def test_the_weight_falls_from_the_first_epoch_to_the_last():
    kl, reference = preset("kdrl").parts()["kl"], preset("kdrl").parts()["reference"]
    assert reference == Teacher() and reference([{}], dict, 3) == []
    assert [at_epoch(kl, RunState(epoch, 5)).weight for epoch in (0, 2, 4)] == pytest.approx([5e-3, 3e-3, 1e-3])


def test_the_reference_is_the_teacher(tmp_path):
    own = trainer(teacher(tmp_path))
    [part, *_], asked, _ = sampling.sample(own, own.prompts[:2])
    own.kl_reference.start_epoch(loop.epoch(own), own.rollouts, 0, 2)
    before, spent = own.policy.model, own.policy.evaluations
    [found] = loop.reference(own, part, asked)
    assert own.policy.model is before and own.policy.evaluations > spent and not found.logp.requires_grad
    [taken] = part.transitions
    model, tokenizer = tiny.model()
    alone = CausalLM(type(model).from_pretrained(tmp_path), tokenizer, None, Text(max_tokens=6))
    expected = alone.log_probs(asked, taken.prompts, taken.ids, taken.old.mask, Decoding())
    torch.testing.assert_close(found.logp, expected.logp, rtol=0, atol=1e-5)
    assert (found.logp - taken.old.logp).abs().max() > 1e-2
    [again] = loop.reference(own, part, asked)
    assert torch.equal(again.logp, found.logp) and len(own.policy._teachers) == 1


@pytest.mark.fast
def test_the_policy_moves_to_a_teacher_with_its_tokenizer(tmp_path):
    own = trainer(teacher(tmp_path), {"short": lambda texts, prompts: [0.0] * len(texts)}, adapter__rank=8,
                  train__lr=1e-2, train__epochs=12, train__group=8, train__micro_batch=16,
                  parts={"kl": {"weight": 1.0, "schedule": None}})
    told = []
    for own.epoch in range(12):
        told.append(own.run_epoch()["kl"])
    assert sum(told[-3:]) < 0.6 * sum(told[:3])
    own = trainer(teacher(tmp_path, extra=["zz"]))
    assert "another tokenizer than the model" in message(own.run_epoch)


def test_teachers_have_decisions_and_the_kls_gradient():
    teacher = {"reference": {"type": "Teacher", "model": "x"}}
    refused("got Teacher, which reads a joint density or .*completions or", resolve,
            tiny_images.config(method="expo", parts=teacher))
    assert resolve(tiny_images.config(method="flow_grpo", parts=teacher)).loss.reference == Teacher("x")
    # Over all tokens of a distribution, each counted by its probability.
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([0.1, 0.2, -0.4], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    [sampled] = torch.autograd.grad((policy.exp().detach() * k2(policy, other)).sum(), logits, retain_graph=True)
    [exact] = torch.autograd.grad((policy.exp() * (policy - other)).sum(), logits)
    close(sampled, exact.tolist())
