"""Sequence design with a known optimum: a masked language model of DNA-like sequences, tuned by `drakes`.

    python scripts/measure/try_drakes.py --length 12 --alpha 0.5 --epochs 200

Trains a small masked language model on a Markov chain over four letters, writes it as a model's folder, runs `flowgrpo
train` on it with the log-odds of a position-weight matrix as reward, and prints reward and KL of base and tuned model
beside those of the optimum p exp(R / alpha) / Z, which is known: a chain with weights at its places is a chain.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flowgrpo.rewards import differentiable
from flowgrpo.text.rewards.embeddings import letters

ALPHABET = "ACGT"
TOKENS = ["<pad>", "</s>", "=", *ALPHABET, "<mask>"]  # the mask is the last
PROMPT, FIRST, MASK = 2, 3, len(TOKENS) - 1  # tokens: the prompts', the first letter, the mask
START = torch.tensor([0.4, 0.3, 0.2, 0.1])
NEXT = torch.tensor([[0.1, 0.5, 0.2, 0.2], [0.3, 0.1, 0.4, 0.2], [0.2, 0.2, 0.1, 0.5], [0.4, 0.2, 0.3, 0.1]])
# Of each letter at each place, over and over; it wants GATC, which the chain finds unlikely.
MOTIF = torch.tensor([[-0.5, -0.4, 1.0, -0.1], [0.8, -0.2, -0.5, -0.1], [-0.3, -0.6, -0.1, 1.0],
                      [-0.2, 0.7, -0.4, 0.1]])
MOST = 8  # letters of the longest prompt, which is a row of `=`
RECIPE = """model: {model}
method: drakes
parts: {{relaxation: {{kl: {alpha}, temperature: 0.5, schedule: {{type: Linear, last: 0.2}}}}}}
reward: "{script}:motif"
prompts: {prompts}
held_out: 0.25
text: {{max_tokens: {length}, eval_temperature: 1.0}}
adapter: {{rank: 0}}
train: {{epochs: {epochs}, prompts: 4, group: 64, micro_batch: 64, lr: 1.0e-3, schedule: linear, save_every: 1000}}
eval: {{prompts: 2, samples: 64, grid: 2}}
tracker: none
device: cpu
output: {output}
name: drakes
"""


def weights(length: int) -> Tensor:
    """Position-weight matrix of a sequence, [length,4]."""
    return MOTIF[torch.arange(length) % len(MOTIF)]


@differentiable
def motif(texts, prompts):
    """Log-odds of the position-weight matrix, summed over places."""
    found = letters(texts, ALPHABET)
    return (found * weights(found.shape[1]).to(found)).sum((1, 2))


def build_tokenizer():
    """One token per letter."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>",
                                   mask_token="<mask>")


def chains(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Sequences of the chain, int64 [count,length] from 0 to 3."""
    found = [torch.multinomial(START, count, True, generator=generator)]
    while len(found) < length:
        found.append(torch.multinomial(NEXT[found[-1]], 1, generator=generator)[:, 0])
    return torch.stack(found, 1)


def build_model(length: int, steps: int, hidden: int = 32, rows: int = 256, lr: float = 3e-3, seed: int = 0):
    """(model, tokenizer): a BERT trained on the chain by masking, its loss the bound of LLaDA (2502.09992)."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    model = BertForMaskedLM(BertConfig(
        vocab_size=len(TOKENS), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=length + MOST, initializer_range=0.1, pad_token_id=0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    optimizer, draws = torch.optim.AdamW(model.parameters(), lr=lr), torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        prompt = int(torch.randint(1, MOST + 1, (), generator=draws))
        ids, count = chains(rows, length, draws) + FIRST, torch.randint(1, length + 1, (rows, 1), generator=draws)
        masked = torch.rand(ids.shape, generator=draws).argsort(1) < count
        inputs = torch.cat([torch.full((rows, prompt), PROMPT), ids.where(~masked, MASK)], 1)
        each = cross_entropy(model(input_ids=inputs).logits[:, prompt:][masked], ids[masked], reduction="none")
        optimizer.zero_grad()
        ((each / count.expand_as(ids)[masked]).sum() / rows).backward()
        optimizer.step()
    return model.eval(), build_tokenizer()


def optimum(length: int, alpha: float) -> tuple[float, float]:
    """(reward, KL to the chain) of the law p exp(R / alpha) / Z: with b = 1 / alpha the reward is d log Z / db, and the
    KL b R - log Z."""
    b = torch.tensor(1 / alpha, dtype=torch.float64, requires_grad=True)
    own, total = weights(length).double(), START.double().log() + b * weights(length)[0].double()
    for place in range(1, length):
        total = (total[:, None] + NEXT.double().log()).logsumexp(0) + b * own[place]
    log_z = total.logsumexp(0)
    [reward] = torch.autograd.grad(log_z, b)
    return reward.item(), (b * reward - log_z).item()


@torch.no_grad()
def measured(folder: Path, base: Path, length: int, count: int = 2000) -> tuple[float, float]:
    """(the mean reward, the KL to the base model) of a model's answers."""
    from flowgrpo.config.sections import Text
    from flowgrpo.text.policies.masked_lm import MaskedLM
    from flowgrpo.text.policies.text_weights import load_causal_lm
    from flowgrpo.text.samplers.decoding import Unmasking
    from flowgrpo.text.samplers.gumbel_softmax import GumbelSoftmax

    tuned, start = (load_causal_lm(str(each), classes=MaskedLM.classes) for each in (folder, base))
    policy = MaskedLM(*tuned, None, Text(max_tokens=length))
    held = {f"model.{key}": each for key, each in start[0].named_parameters()}
    answers, kl = policy.sample_relaxed(policy.encode(["="]), torch.zeros(count, dtype=torch.int64),
                                       policy.generators(range(count)), Unmasking(order="random"), GumbelSoftmax(),
                                       held)
    ids = answers.argmax(-1)
    texts = policy.detokenize(ids, torch.ones_like(ids, dtype=torch.bool), ["="] * count)
    return motif(texts, None).mean().item(), kl.mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=12)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=2000, help="of the model's own training")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("runs"))
    args = parser.parse_args()
    base, prompts = args.output / "drakes-model", args.output / "drakes-prompts.txt"
    for part in build_model(args.length, args.steps, hidden=64):
        part.save_pretrained(base)
    prompts.write_text("".join("=" * (n + 1) + "\n" for n in range(MOST)))
    recipe = args.output / "drakes.yaml"
    recipe.write_text(RECIPE.format(model=base, prompts=prompts, script=Path(__file__).resolve(), length=args.length,
                                    alpha=args.alpha, epochs=args.epochs, output=args.output))
    subprocess.run([sys.executable, "-m", "flowgrpo", "train", str(recipe), "--trust"], check=True)
    rows = {"base": measured(base, base, args.length), "optimum of the chain": optimum(args.length, args.alpha),
            "tuned": measured(args.output / "drakes" / "model", base, args.length)}
    for name, (reward, kl) in rows.items():
        print(f"{name:22} reward {reward:7.3f}   KL {kl:7.3f}   reward - alpha KL {reward - args.alpha * kl:7.3f}")


if __name__ == "__main__":
    main()
