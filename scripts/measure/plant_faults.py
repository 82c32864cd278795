"""Plant faults in the package, one at a time, and report which tier of the tests finds each.

    python scripts/measure/plant_faults.py --output planted.json            # all, resumed where an earlier run stopped
    python scripts/measure/plant_faults.py --output planted.json --only clip # those whose description has the word
    python scripts/measure/plant_faults.py --output planted.json --table     # print the table of what ran

A fault replaces one line in a copy of the tree. The tests of its room run first, then all of the tier: a tier finds
the fault if one test fails. `tests/test_mechanisms.py` holds that every fault still applies.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """One planted fault: `old` in `file` becomes `new`. rooms: tests that run first."""

    about: str
    file: str
    old: str
    new: str
    rooms: tuple[str, ...]


def fault(about: str, file: str, old: str, new: str, *rooms: str) -> Fault:
    return Fault(about, f"flowgrpo/{file}", old, new, tuple(f"tests/{room}" for room in rooms))


LOOP = ("test_train.py", "training")
FAULTS = (
    # densities
    fault("log-density without its log std", "gaussian.py", "- std.log() -", "-", "test_gaussian.py"),
    fault("log-density without the half", "gaussian.py", ".square() / 2 - std", ".square() - std", "test_gaussian.py"),
    fault("KL without the std", "gaussian.py", "((mean_p - mean_q) / std)", "(mean_p - mean_q)", "test_gaussian.py"),
    fault("sum in place of a mean over dimensions", "gaussian.py", "density.reshape(len(density), -1).mean(dim=1)",
          "density.reshape(len(density), -1).sum(dim=1)", "test_gaussian.py"),
    # SDE steps and solvers
    fault("sign of the SDE's drift correction", "samplers/kernels.py", "- pull * x1", "+ pull * x1", "samplers"),
    fault("SDE drift correction twice as large", "samplers/kernels.py", "pull=g**2 * delta / (2 * sigma)",
          "pull=g**2 * delta / sigma", "samplers"),
    fault("std of the SDE without the root of the step", "samplers/kernels.py", "std=g * delta.sqrt()",
          "std=g * delta", "samplers"),
    fault("CPS with sine and cosine swapped", "samplers/kernels.py", "fresh=math.sin(angle), kept=math.cos(angle)",
          "fresh=math.cos(angle), kept=math.sin(angle)", "samplers"),
    fault("DDIM's std without 1 - alpha'", "samplers/kernels.py", "return Gaussian(mean, ((1 - after) * fresh).sqrt())",
          "return Gaussian(mean, fresh.sqrt())", "samplers"),
    fault("singularity at sigma 1 not replaced", "samplers/kernels.py", "data < 1e-3", "data < -1", "samplers"),
    fault("sign of the multistep correction", "samplers/kernels.py", "(m0 + slope / 2)", "(m0 - slope / 2)",
          "samplers"),
    fault("shift of the grid inverted", "samplers/grids.py", "t / (t + (1 - t) / shift)", "t / (t + (1 - t) * shift)",
          "samplers"),
    fault("window off by one", "samplers/plans.py", "return limit - self.size", "return limit - self.size - 1",
          "samplers"),
    fault("window that does not move", "samplers/plans.py", "self.start, last + 1, self.stride",
          "self.start, self.start + 1, self.stride", "samplers"),
    fault("random steps that do not follow the epoch", "samplers/plans.py", 'random.Random(f"{seed}/{epoch}")',
          'random.Random(f"{seed}")', "samplers"),
    fault("quiet steps are trained", "samplers/rollout.py", "< LEAST)", "< 0)", "samplers"),
    # rollout, record, replay
    fault("state recorded before it is rounded", "samplers/growth.py", "noise_like(x[of], own)).to(x.dtype)",
          "noise_like(x[of], own))", "samplers", "policies"),
    fault("noise of all samples from the first sample's seed", "samplers/growth.py",
          "seeds = [self.seed(prompt, self.offset + leaf) for prompt, leaf in new]",
          "seeds = [self.seed(prompt, self.offset) for prompt, leaf in new]", "samplers"),
    fault("seed that does not read the prompt", "samplers/rollout.py", "fork_seed(run_seed, epoch, prompt,",
          "fork_seed(run_seed, epoch, first,", "samplers"),
    fault("seed that does not read the epoch", "samplers/rollout.py", "fork_seed(run_seed, epoch,",
          "fork_seed(run_seed, 0,", "samplers", "training"),
    fault("replay of the next recorded step", "samplers/growth.py",
          "step = taken[0][0].step if len(taken) == 1", "step = taken[0][0].step + 1 if len(taken) == 1", "samplers"),
    fault("replay with a swapped prompt", "samplers/growth.py", "conditioning.rows(prompts), x, exploration.grid",
          "conditioning.rows(prompts.flip(0)), x, exploration.grid", "samplers", "policies"),
    fault("mean of another row in a tree", "samplers/growth.py", "exploration.grid, taken.step).rows(of)",
          "exploration.grid, taken.step).rows(of.flip(0))", "samplers"),
    fault("noised finals with data and noise swapped", "samplers/noised_finals.py",
          "((1 - t) * clean + t * noise, noise - clean)", "(t * clean + (1 - t) * noise, noise - clean)", "samplers"),
    fault("old policy that never follows", "samplers/old_policy.py", "if epoch > self.epoch:", "if epoch < self.epoch:",
          "samplers"),
    fault("completion rows kept without their mask", "types.py",
          "some = self.old.mask.any(1).cpu()", "some = torch.ones(len(self.ids), dtype=torch.bool)", "samplers",
          "test_gaussian.py"),
    fault("correction of kept transitions not narrowed", "types.py",
          "self.importance[keep.to(self.importance.device)]", "self.importance[: int(keep.sum())]", "test_gaussian.py",
          "samplers"),
    # advantages
    fault("std of a group with ddof 0", "advantages/group.py", "def group_std(rewards: Tensor, ddof: int = 1)",
          "def group_std(rewards: Tensor, ddof: int = 0)", "advantages"),
    fault("advantage with the opposite sign", "advantages/group.py",
          "return (rewards - rewards.nanmean(dim=1, keepdim=True))",
          "return (rewards.nanmean(dim=1, keepdim=True) - rewards)", "advantages"),
    fault("advantage over the mean of the batch", "advantages/group.py",
          "return (rewards - rewards.nanmean(dim=1, keepdim=True))", "return (rewards - rewards.nanmean())",
          "advantages"),
    fault("leave-one-out without its factor", "advantages/group.py", "advantages * count / (count - 1).clamp(min=1)",
          "advantages", "advantages"),
    fault("groups without variance are trained", "advantages/group.py",
          "return advantages.masked_fill(zero_variance(rewards)[:, None], 0).to(dtype)", "return advantages.to(dtype)",
          "advantages"),
    fault("missing reward counts as 0", "advantages/group.py", "torch.where(missing, means, double)",
          "double.nan_to_num(0)", "advantages"),
    fault("clamp of the advantage on one side", "advantages/group.py", "trim).clamp(-self.clamp, self.clamp)",
          "trim).clamp(-self.clamp)", "advantages"),
    fault("worst samples dropped", "advantages/selection.py",
          "[ranked[:, : self.n // 2], ranked[:, size - self.n // 2 :]]",
          "[ranked[:, size - self.n :]]", "advantages"),
    # losses
    fault("clip's bounds swapped", "objectives/surrogates.py", "return -self.low, self.high",
          "return -self.high, self.low", "objectives"),
    fault("DualClip on good samples", "objectives/surrogates.py",
          "torch.where(advantage < 0, torch.minimum(loss, -self.dual * advantage), loss)",
          "torch.where(advantage > 0, torch.minimum(loss, -self.dual * advantage), loss)", "objectives"),
    fault("Guard without its bias", "objectives/ratios.py", "(new.logp - old.logp + divergence(new, old))",
          "(new.logp - old.logp)", "objectives"),
    fault("ratio of a sequence without the mask", "objectives/ratios.py",
          "mean = ((new.logp - old.logp) * new.mask).sum(1, keepdim=True)",
          "mean = (new.logp - old.logp).sum(1, keepdim=True)", "objectives"),
    fault("k3 with the opposite log-ratio", "objectives/kl.py", "log_ratio = reference - new",
          "log_ratio = new - reference", "objectives"),
    fault("KL without its weight", "objectives/kl.py", "return self.weight * self.distance(new, reference)",
          "return self.distance(new, reference)", "objectives"),
    fault("loss without the mask", "objectives/reductions.py", "return (loss * weights).sum() / max(count, 1)",
          "return loss.sum() / max(count, 1)", "objectives"),
    fault("mean over a row without the length", "objectives/reductions.py",
          "return mask / mask.sum(1, keepdim=True).clamp(min=1)", "return mask", "objectives"),
    # loop
    fault("KL with the opposite sign", "train.py", "loss = loss + penalty", "loss = loss - penalty", *LOOP),
    fault("weights of the steps dropped", "train.py", "loss = loss * (part.weights or epoch.weights)[transitions.step]",
          "loss = loss * 1.0", *LOOP),
    fault("staleness correction dropped from the loss", "train.py",
          "loss = loss * to_device(transitions.importance[rows], device)", "pass", *LOOP),
    fault("gradients of other processes not added", "train.py",
          "self.optimization.gradients.finish(self.log)", "pass", "distributed"),
    fault("gradients not cleared between steps", "train.py", "        self.optimization.zero_grad()\n", "", *LOOP),
    fault("reference that is the present policy", "training/kl_reference.py",
          "else self.policy.reference(self.snapshots)", "else torch.no_grad()", *LOOP),
    fault("stale scores of the reference", "training/kl_reference.py",
          "        self.cached = {}\n        self.rollouts, ", "        self.rollouts, ", *LOOP),
    fault("first-ratio check that never fails", "training/first_ratio.py", "if not left <= self.limit:", "if False:",
          *LOOP),
    fault("warm-up that starts at the full rate", "training/optimizer.py", "return (update + 1) / train.warmup",
          "return 1.0", *LOOP),
    fault("gradient that is not clipped", "training/optimizer.py",
          "norm = clip(self.parameters, train.clip_grad)", "norm = clip(self.parameters, math.inf)", *LOOP),
    fault("step with a gradient that is not finite", "training/optimizer.py",
          "self.unsteady = not torch.isfinite(norm)", "self.unsteady = False", *LOOP),
    fault("moving average that does not move", "training/optimizer.py", ", 1 - decay)", ", 0.0)", *LOOP),
    fault("kept stale rollout", "contrib/staleness/extension.py", "if drawn.epoch >= run.epoch]", "]",
          "contrib/staleness"),
    fault("old scores of a stale epoch are not recomputed", "contrib/staleness/extension.py",
          "if drawn.update != run.optimization.update:", "if False:", "contrib/staleness"),
    # prompts, processes, storage, policies
    fault("the same prompts in every epoch", "data/sets.py", "_walk(len(prompts), rest, epoch, seed)",
          "_walk(len(prompts), rest, 0, seed)", "data"),
    fault("held-out prompts are trained on", "data/sets.py",
          "train = [prompt for prompt in prompts if prompt.key not in keys]", "train = [*prompts]", "data"),
    fault("shares of processes overlap", "distributed/processes.py", "for rank in (self.rank, self.rank + 1))",
          "for rank in (0, self.rank + 1))", "distributed"),
    fault("oldest checkpoints are kept", "storage/checkpoint.py",
          "sorted(reversed(known), key=lambda path: is_marked(path, UNSTEADY))[:keep]", "known[:keep]", "storage"),
    fault("checkpoint after a skipped update replaces a good one", "storage/checkpoint.py",
          "sorted(reversed(known), key=lambda path: is_marked(path, UNSTEADY))[:keep]", "known[-keep:]", "storage"),
    fault("weights that are not finite are resumed", "training/state.py",
          "if broken := adapters.odd(taken[room]):", "if broken := None:", "policies/weights"),
    fault("checkpoint without checksums", "storage/checkpoint.py", "    manifest.write(temporary)\n", "", "storage"),
    fault("update counter lost on resume", "training/state.py",
          "setattr(attrgetter(holder)(trainer) if holder else trainer, name, state.get(key, 0))", "pass", "training"),
    fault("optimizer's state lost on resume", "training/state.py",
          "    checkpoint.load_optimizer(trainer.optimization.optimizer, taken[\"optimizer\"])\n", "", "training"),
    fault("temperature not applied", "text/samplers/decoding.py", "logits = logits / self.temperature",
          "logits = logits * 1.0", "text/samplers"),
)


def copy_of_tree(folder: Path) -> None:
    """Copy the files and links that git tracks, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():  # flowgrpo/recipes is a link to a folder
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def fails(tree: Path, tests: tuple[str, ...], tier: str, workers: int) -> str | None:
    """Return the first failing test of a tier; None if all pass."""
    chosen = [test for test in tests if (tree / test.split("::")[0]).exists()]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tier", tier, "-n", str(workers),
               "--dist", "loadgroup", "--tb=no", "-rfE", *chosen]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode == 0 or done.returncode == 5:  # 5: no test was selected
        return None
    named = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return named[0] if named else done.stdout[-300:] + done.stderr[-300:]


def tried(tree: Path, fault: Fault, workers: int) -> dict[str, str | None]:
    """Plant a fault and return the first failing test of each tier. What the fast tier finds, the full one finds."""
    file = tree / fault.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        found = fails(tree, fault.rooms, "fast", 0) or fails(tree, ("tests",), "fast", workers)
        return {"fast": found, "full": found or fails(tree, fault.rooms, "full", 0)
                or fails(tree, ("tests",), "full", workers)}
    finally:
        file.write_text(text, encoding="utf-8")


def name_of(line: str) -> str:
    """Return the test's name in a line of pytest's summary."""
    return re.sub("^(FAILED|ERROR) ", "", line).split(" - ")[0].partition("@")[0]  # @: a group of pytest-xdist


def table(results: dict[str, dict[str, str | None]]) -> str:
    rows = [f"| {about} | {'yes' if found['fast'] else '**no**'} | {'yes' if found['full'] else '**no**'} | "
            f"{name_of(found['full'] or '')} |" for about, found in results.items()]
    count = len(results)
    shares = [sum(found[tier] is not None for found in results.values()) for tier in ("fast", "full")]
    return "\n".join(["| fault | fast | full | first failing test |", "|---|---|---|---|", *rows, "",
                      f"found of {count}: fast {shares[0]}, full {shares[1]}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="faults whose description has this text")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="print the table of an earlier run")
    options = parser.parse_args()
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    if not options.table:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder, "tree")
            tree.mkdir()
            copy_of_tree(tree)
            if failing := fails(tree, ("tests/test_gaussian.py",), "fast", 0):
                sys.exit(f"the tests fail without a fault: {failing}")
            for fault in FAULTS:
                if fault.about in results or options.only not in fault.about:
                    continue
                start = time.monotonic()
                results[fault.about] = found = tried(tree, fault, options.workers)
                for test in {name_of(line) for line in found.values() if line}:
                    if fails(tree, (test,), "full", 0):
                        sys.exit(f"{test} fails without a fault")
                options.output.write_text(json.dumps(results, indent=1))
                print(f"{time.monotonic() - start:6.0f} s  {fault.about}: {results[fault.about]['fast']}", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
