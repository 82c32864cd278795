"""The configuration: what is valid round-trips, what is not is told in one line with its path; recipes by name."""

from pathlib import Path

import pytest
import yaml

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.cli.options import recipe_and_options
from flowgrpo.config import load, parse, recipes, schema, yaml_text
from flowgrpo.config.parse import ELSEWHERE, nearest_key
from flowgrpo.config.schema import keys, owner
from flowgrpo.config.sections import AutoRate
from flowgrpo.contrib import phases
from tests.helpers.refusals import error_line, message, refused


def test_defaults_and_packaged_recipes_pass_their_checks():
    assert config.validate(config.Config().model_dump()) == config.Config()
    assert recipes.names() == sorted(file.stem for file in CONFIGS.glob("*.yaml"))
    assert "$(BIN)/python -m flowgrpo demo\n" in (CONFIGS.parent / "Makefile").read_text(encoding="utf-8")
    assert parse.load(recipes.FOLDER / "starter.yaml", {}) == load(CONFIGS / "starter.yaml")


@pytest.mark.parametrize("options", [
    {},
    {"name": "1e5", "model": "on", "method": "a+b", "negative_prompt": "null", "prompts": "été.txt"},
    {"train.lr": "1e-5", "train.betas": "[0.8, 0.95]", "train.checkpointing": "true", "adapter.targets": "[to_q]"},
    {"reward": "{scene: 0.25, my/file.py:f: 2}", "held_out": "held.jsonl", "eval.rewards": "[scene]"},
    {"reward.scene": "1e-1", "parts": "{plan: {size: 2, share: 1e-3}}", "image.call": "{max_sequence_length: 77}"}])
def test_resolved_configuration_runs_again(options, tmp_path):
    resolved = config.load(None, options)
    file = tmp_path / "resolved.yaml"
    file.write_text(resolved.yaml(), encoding="utf-8")
    assert config.load(file) == resolved
    assert config.load(file).yaml() == resolved.yaml()


def test_numbers_with_exponents_and_overrides(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("parts: {kernel: {level: 1e-1, name: '1e-1', steps: 7}}\nheld_out: 2E-1\n")
    resolved = config.load(file, {"parts.kernel.rate": "5e-6"})
    assert resolved.parts == {"kernel": {"level": 0.1, "name": "1e-1", "steps": 7, "rate": 5e-6}}
    assert resolved.held_out == 0.2
    file = tmp_path / "mine.yaml"
    file.write_text("train:\n  lr: 0.1\n  group: 6\n")
    resolved = config.load(file, {"train.lr": "0.2", "eval.steps": 7, "name": "2024"})
    assert (resolved.train.lr, resolved.train.group, resolved.eval.steps, resolved.name) == (0.2, 6, 7, "2024")
    assert config.load(file).name == "mine"
    assert str(resolved.folder) == "runs/2024"
    assert config.load(None, {"reward": "scene"}).rewards == {"scene": 1.0}
    assert config.load(None, {"reward": "{a: 2, b: 0.5}"}).rewards == {"a": 2.0, "b": 0.5}


def test_files_of_a_runs_folder_are_found_where_it_was_copied_to(here):
    raw = {"name": "a", "output": "runs", "model": "starter", "reward": {"runs/a/r.py:f": 2.0, "runs/b/r.py:f": 1.0},
           "prompts": "runs/a/p.jsonl", "held_out": str(here / "runs" / "a" / "h.jsonl"),
           "negative_prompt": "runs/a/p.jsonl", "preferences": "runs/a/gone.jsonl",
           "adapter": {"init": "runs/a/first"}, "cache": "./runs/a/cache"}
    for folder in ("runs/a", "copy", "runs/a.1"):
        for made in ("first", "cache"):
            Path(folder, made).mkdir(parents=True)
        for name in ("r.py", "p.jsonl", "h.jsonl"):
            Path(folder, name).touch()
        Path(folder, "config.yaml").write_text(config.validate(raw).yaml())
    for folder in ("copy", "runs/a.1"):
        found = config.load(f"{folder}/config.yaml")
        assert [*found.reward] == [f"{folder}/r.py:f", "runs/b/r.py:f"] and found.prompts == f"{folder}/p.jsonl"
        assert (found.held_out, found.cache) == (f"{folder}/h.jsonl", f"{folder}/cache")
        assert found.adapter.init == f"{folder}/first" and found.preferences == "runs/a/gone.jsonl"
        assert found.negative_prompt == "runs/a/p.jsonl" and found.folder == Path("runs/a")
    for place in ("runs/a/config.yaml", here / "runs" / "a" / "config.yaml"):
        assert config.load(place) == config.validate(raw)  # where it was


def test_what_an_earlier_run_recorded_opens_under_the_names_of_today(tmp_path):
    made = config.validate({"image": {"height": 72}, "phases": [{"at": 2, "set": {"image.frames": 3}}]})
    old = made.yaml().replace("\nimage:", "\npicture:").replace("image.frames", "picture.frames")
    (tmp_path / "config.yaml").write_text(old)
    assert "image" not in yaml.safe_load(old) and config.load(tmp_path / "config.yaml") == made
    (tmp_path / "recipe.yaml").write_text("picture: {height: 72}")
    refused("recipe.yaml: unknown key 'picture': it is called 'image' now", config.load, tmp_path / "recipe.yaml")
    refused("phases.0..set: 'picture.frames' .* it is called 'image.frames' now", phases.config_of,
            config.validate({"phases": [{"at": 2, "set": {"picture.frames": 3}}]}), 0)


@pytest.mark.parametrize("raw, told", [
    ({"train": {"lr": "fast"}}, "train.lr: got 'fast', expected a valid number or 'auto' or keys with values"),
    ({"train": {"group": 2.5}}, "train.group: got 2.5, expected a valid integer"),
    ({"train": 3}, "train: got 3, expected keys with values"),
    ({"train": None}, "train: got None, expected keys with values"),
    ({"name": 2024}, "name: got 2024, expected a valid string"),
    ({"adapter": {"targets": ["to_q", 3]}}, "adapter.targets.1: got 3, expected a valid string"),
    ({"reward": 5}, "reward: got 5, expected a valid string or a valid dictionary"),
    ({"reward": {"scene": "much"}}, "reward.scene: got 'much', expected a valid number"),
    ({"precision": "fp64"}, "precision: got 'fp64', expected 'auto', 'fp32', 'bf16' or 'fp16'"),
    ({"train": {"checkpointing": "perhaps"}},
     "train.checkpointing: got 'perhaps', expected a valid boolean or a valid number or 'auto'"),
    ({"train": {"micro_batch": 0}}, "train.micro_batch: got 0, expected a number greater than or equal to 1 or 'auto'"),
    ({"train": {"checkpointing": 1.5}},
     "train.checkpointing: got 1.5, expected a valid boolean or a number less than or equal to 1 or 'auto'"),
    ({"memory": {"shard": "hosts"}}, "memory.shard: got 'hosts', expected a valid boolean or 'nodes'"),
    ({"train": {"betas": [0.9]}}, "train.betas.1: got [0.9], expected one more value"),
    ({"train": {"lr": 0}}, "train.lr: got 0, expected a number greater than 0 or 'auto' or keys with values"),
    ({"train": {"group": 0}}, "train.group: got 0, expected a number greater than or equal to 1"),
    ({"train": {"ema": 1}}, "train.ema: got 1, expected a number less than 1"),
    ({"train": {"lr": float("inf")}}, "train.lr: got inf, expected a finite number or 'auto' or keys with values"),
    ({"reward": {"scene": float("nan")}}, "reward.scene: got nan, expected a finite number"),
    ({"seed": -1}, "seed: got -1, expected a number greater than or equal to 0"),
    ({"reward": {}}, "reward: got {}, expected at least 1 item")])
def test_wrong_types_and_ranges_have_their_path(raw, told):
    assert message(config.validate, raw, "r.yaml") == f"r.yaml: {told}"


@pytest.mark.parametrize("image, told", [
    ({"height": 24, "call": {"height": 16}}, "height is 24, and call has height too: leave one out"),
    ({"width": 24, "call": {"height": 16, "width": 24}}, "width is 24, and call has width too: leave one out"),
    ({"frames": 5, "call": {"num_frames": 9}}, "frames is 5, and call has num_frames too: leave one out"),
    *(({"fps": 8, "call": {name: 24}}, f"fps is 8, and call has {name} too: leave one out")
      for name in ("fps", "frame_rate", "target_fps")),
    *(({"call": {name: 1}}, f"call has {name}, which {key} sets: leave it out of call") for name, key in {
        "prompt": "prompts", "negative_prompt": "negative_prompt", "num_inference_steps": "train.steps or eval.steps",
        "guidance": "train.guidance or eval.guidance", "generator": "seed", "latents": "seed",
        "num_images_per_prompt": "train.group or eval.samples", "num_videos_per_prompt": "train.group or eval.samples",
        "output_type": "every call", "return_dict": "every call", "callback_on_step_end": "every call",
        "prompt_embeds": "every call", "negative_prompt_embeds": "every call"}.items()),
    *(({"call": {name: 16}}, "") for name in ("height", "width", "num_frames", "frame_rate", "max_sequence_length")),
    ({"sizes": [[16, 24]], "call": {"height": 16, "width": 16}}, "")])  # of evaluations
def test_an_argument_of_a_call_has_one_key(image, told):
    if told:
        assert message(config.validate, {"image": image}).endswith(f"expected {told}")
    else:
        assert image["call"].items() <= config.validate({"image": image}).call.items()


@pytest.mark.parametrize("text, told", [
    ("trian: {lr: 1}", "unknown key 'trian': did you mean 'train'?"),
    ("train: {group_size: 8}", "unknown key 'train.group_size': did you mean 'train.group'?"),
    ("eval: {stepss: 8}", "unknown key 'eval.stepss': did you mean 'eval.steps'?"),
    ("lr: 1e-4", "unknown key 'lr': did you mean 'train.lr'?"),
    ("train: {learning_rate: 1e-4}", "unknown key 'train.learning_rate': did you mean 'train.lr'?"),
    ("train.lr: 1e-4", "unknown key 'train.lr': in a file, write 'lr' below 'train'"),
    ("image: {zzz: 1}", "'image.zzz'; there are: image.height, image.width, image.frames, image.fps, image.sizes, "
                        "image.call"),
    ("picture: {height: 64}", "r.yaml: unknown key 'picture': it is called 'image' now"),
    ("qqqq: 1", "unknown key 'qqqq'; there are: name, model, "),
    ("train: {epochs: 1:30}", "train.epochs: got '1:30', expected a valid integer"),
    ("train: {epochs: yes}", "train.epochs: got 'yes', expected a valid integer"),
    ("train: {epochs: true}", "train.epochs: got True, expected a number"),
    ("seed: false", "seed: got False, expected a number"),
    ("held_out: true", "held_out: got True, expected a number"),
    ("image: {sizes: [[true, 64]]}", "image.sizes.0.0: got True, expected a number greater than or equal to 8"),
    ("reward: {scene: true}", "reward: got {'scene': True}, expected a number"),
    ("reward: {scene: {weight: true}}", "reward.scene.weight: got True, expected a number"),
    ("reward: {scene: 0}", "reward: got {'scene': 0}, expected a weight other than 0 for one of them"),
    ("reward: {a: 0, b: {weight: 0}}", "expected a weight other than 0 for one of them"),
    ("output: ~nobody-of-this-name/x", "output: ~nobody-of-this-name/x: there is no user 'nobody-of-this-name'"),
    ("prompts: http://a/b.txt", "prompts: got 'http://a/b.txt', expected a prompt set, a file of this machine"),
    *((f"name: '{name}'", f"name: got '{name}', expected the name of one folder, without slashes")
      for name in ("../elsewhere", "a/b", "/tmp/x", "..", ".")),
    ("prompts: ''", "prompts: got '', expected at least 1 character")])
def test_unknown_keys_and_what_yaml_or_pydantic_would_take_for_another_value_are_refused(text, told):
    assert told in message(config.validate, yaml_text.parse(text), "r.yaml")


@pytest.mark.parametrize("text, value", [
    ("1:30", "1:30"), ("yes", "yes"), ("off", "off"), ("true", True), ("2024-01-01", "2024-01-01"), ("0x1F", 31),
    ("1_000", 1000), ("007", 7), ("08", "08"), ("1e-4", 1e-4), ("-.5", -0.5), (".inf", float("inf")), ("~", None)])
def test_values_of_yaml(text, value):
    assert yaml_text.parse(text) == value and type(yaml_text.parse(text)) is type(value)


def test_numbers_weights_of_zero_and_limits_stay_and_octal_is_refused():
    with pytest.raises(yaml.YAMLError, match="got 010, which is 8 in YAML 1.1 and 10 in YAML 1.2"):
        yaml_text.parse("a: 010")
    assert config.validate({"reward": {"a": 1, "b": 0}}).rewards == {"a": 1.0, "b": 0.0}
    assert config.validate({"reward": {"a": {"limit": {"at_most": 0.1}}}}).rewards == {"a": 0.0}
    assert config.validate({"train": {"checkpointing": True}, "memory": {"shard": "yes"}}).memory.shard is True


def test_a_home_folder_is_the_users(monkeypatch):
    """In texts and keys that are paths, and in no text that is a prompt."""
    monkeypatch.setenv("HOME", "/of/me")
    made = config.validate({"output": "~/runs", "reward": {"~/red.py:red": 1}, "negative_prompt": "~/x",
                            "load": {"lora": ["~/a.safetensors"]}, "model": "a~/b"})
    assert (made.output, made.model, made.negative_prompt) == ("/of/me/runs", "a~/b", "~/x")
    assert list(made.rewards) == ["/of/me/red.py:red"] and made.load.lora[0] == "/of/me/a.safetensors"
    assert config.load(None, {"output": "~/runs", "cache": "~"}).cache is None


@pytest.mark.parametrize("text, told", [
    (b"a: [1\nb: 2", "is not valid YAML: expected ',' or ']', but got ':' (line 2, column 2)"),
    (b"- a\n- b\n", "expected keys with values at the top, got a list"),
    (b"a: \xff\xfe", "is not valid YAML: 'utf-8' codec can't decode"),
    (b"seed: 1\ntrain:\n  epochs: 3\n  lr: 1.0e-4\n  epochs: 5\n",
     "is not valid YAML: the key 'epochs' stands twice (line 5, column 3)"),
    (b"train: {lr: -1}", "train.lr: got -1, expected a number greater than 0")])
def test_broken_recipes_are_named(text, told, tmp_path):
    file = tmp_path / "r.yaml"
    file.write_bytes(text)
    assert told in message(config.load, file) and message(config.load, file).startswith(str(file))


def test_empty_recipes_and_what_overrides_own(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("# nothing yet\n")
    assert config.load(file) == config.Config()
    file = tmp_path / "r.yaml"
    file.write_text("reward: scene\n")
    assert message(config.load, file, {"reward.scene": "1"}).startswith("--reward.scene: reward is a value")
    assert schema.owner("train.lr") == "train.lr"
    assert schema.owner("parts.plan.size") == "parts"
    assert schema.owner("reward.scene") == "reward"
    assert schema.owner("train") is None and schema.owner("trainer.lr") is None


def write_recipes(folder, **texts) -> None:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)


def test_a_recipe_extends_another(tmp_path):
    """Sections by key, parts by part, other values as a whole; the file's own name; a chain of files."""
    (tmp_path / "base").mkdir()
    write_recipes(tmp_path / "base", first="name: chosen\nmethod: flow_grpo\nreward: {a: 1, b: 2}\nadapter: {rank: 8}\n"
            "parts: {kernel: {level: 0.7}, plan: {size: 2, order: random}}\ntrain: {lr: 0.5, group: 6}\n"
            "eval: {every: 7, rewards: {c: {}}}\n")
    write_recipes(tmp_path, second="extends: base/first.yaml\nparts: {plan: {size: 3}}\nreward: {b: 1}\n"
            "train: {lr: 0.25}\neval: {rewards: {d: {}}}\n", third="extends: second.yaml\ntrain: {micro_batch: 3}\n",
            other="extends: second.yaml\nmethod: mix_grpo\n")
    second, third, other = (config.load(tmp_path / f"{name}.yaml") for name in ("second", "third", "other"))
    assert second.parts == {"kernel": {"level": 0.7}, "plan": {"size": 3}}
    assert (second.method, second.rewards, second.adapter.rank) == ("flow_grpo", {"b": 1.0}, 8)
    assert (second.train.lr, second.train.group, second.eval.every, list(second.extra_rewards)) == (0.25, 6, 7, ["d"])
    assert (second.name, third.name, third.train.micro_batch, third.train.lr) == ("second", "third", 3, 0.25)
    assert other.parts == {} and other.train == second.train
    write_recipes(tmp_path, resolved=third.yaml())
    assert config.load(tmp_path / "resolved.yaml") == third


@pytest.mark.parametrize("name, told", [
    ("a", "b.yaml: extends: recipes extend each other in a circle: a.yaml -> b.yaml -> a.yaml; leave one extends out"),
    ("alone", "alone.yaml: extends: recipes extend each other in a circle: alone.yaml -> alone.yaml"),
    ("many", "many.yaml: extends: got ['a.yaml'], expected the file of one recipe"),
    ("absent", "broken.yml: did you mean 'broken.yaml'?"),
    ("of_broken", "broken.yaml: train.lr: got -1, expected a number greater than 0"),
    ("wrong", "wrong.yaml: unknown key 'train.grop': did you mean 'train.group'?")])
def test_a_recipe_that_cannot_be_extended_is_named(name, told, tmp_path):
    write_recipes(tmp_path, a="extends: b.yaml", b="extends: a.yaml", alone="extends: alone.yaml", fine="seed: 1",
                  many="extends: [a.yaml]", absent="extends: broken.yml", broken="train: {lr: -1}",
                  of_broken="extends: broken.yaml", wrong="extends: fine.yaml\ntrain: {grop: 4}")
    assert told in message(config.load, tmp_path / f"{name}.yaml")


@pytest.mark.parametrize("options, told", [
    ({"train.lr": "-1"}, "the options: train.lr: got -1, expected a number greater than 0"),
    ({"reward": "{a: 1"}, "--reward: '{a: 1' is not valid YAML: expected ',' or '}'"),
    ({"train.shift.x": "1"}, "the options: train.shift: got {'x': 1}, expected a valid number"),
    ({"train.lr.x": "1"}, "the options: unknown key 'train.lr.x'; there are: start, target, updates, states")])
def test_overrides_go_through_the_same_check(options, told):
    assert message(config.load, None, options).startswith(told)


@pytest.mark.parametrize("name, key", [(name, key) for key, names in ELSEWHERE.items() for name in names])
def test_names_of_other_libraries_find_their_key(name, key):
    assert owner(key) is not None
    for given in (name, f"train.{name}"):
        if owner(given) is None:
            assert nearest_key(given, keys()) == f": did you mean {key!r}?"


def train(lr):
    return config.load(None, {"train.lr": lr}).train


def test_a_rate_is_a_number_found_or_the_default():
    assert train("1e-3").calibration is None and train("1e-3").first_lr == 1e-3
    assert train("auto").calibration == AutoRate() and train("auto").first_lr == AutoRate().start
    own = train("{start: 1e-5, target: 0.03}")
    assert own.calibration == AutoRate(start=1e-5, target=0.03) and own.first_lr == 1e-5
    assert config.Config().train.calibration is None and config.Config().train.first_lr == 3e-4


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["starter", "sdxl_24gb", "sdxl_8x80"])
def test_a_name_is_the_packaged_recipe(name, here):
    """From any folder, with the name of its run, and what it extends."""
    assert load(name) == load(CONFIGS / f"{name}.yaml") and load(name).name == name


def test_a_local_file_of_that_name_wins_and_a_folder_does_not(here):
    (here / "sdxl_24gb").write_text("method: flow_grpo\n")
    (here / "starter").mkdir()
    assert load("sdxl_24gb").method == "flow_grpo" and load("sdxl_24gb").model == "starter"
    assert load("starter").parts["plan"] == {"size": 3, "order": "frozen"}


def test_a_recipe_of_the_user_extends_a_packaged_one_or_one_below_the_home_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("extends: sdxl_24gb\nreward: pick_score\n")
    found = load(tmp_path / "mine.yaml")
    assert found.reward == "pick_score" and found.name == "mine"
    assert found.model_copy(update={"reward": "hpsv2.1", "name": "sdxl_24gb"}) == load("sdxl_24gb")
    # By its own name and under `extends`; a folder named ~ is not looked for.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text("extends: starter\nprompts: ~/p.txt\n")
    (tmp_path / "mine.yaml").write_text("extends: ~/base.yaml\nseed: 3\n")
    found = load("~/mine.yaml")
    assert (found.seed, found.prompts, found.name) == (3, str(tmp_path / "p.txt"), "mine")
    (tmp_path / "mine.yaml").write_text("extends: ~nobody-of-this-name/base.yaml\n")
    refused("mine.yaml: extends: ~nobody-of-this-name/base.yaml: there is no user 'nobody", load, "~/mine.yaml")


@pytest.mark.parametrize("given, told", [
    ("sdxl_24g", "no recipe 'sdxl_24g': did you mean 'sdxl_24gb'?"),
    ("nothing_near_it", "no recipe 'nothing_near_it'"),
    ("configs/sdxl_24gb.yaml", "no recipe at configs/sdxl_24gb.yaml: it does not exist: did you mean the packaged "
                               "recipe sdxl_24gb?"),
    ("no.yaml", "no recipe at no.yaml: it does not exist; expected a YAML file, or a packaged recipe such as starter")])
def test_what_is_neither_is_one_line(given, told, here):
    assert message(load, given).startswith(told)


def test_demo_takes_keys_and_no_recipe_and_check_a_recipes_file_in_place_of_a_model(capsys, tmp_path):
    told = message(recipe_and_options, ["--num_generations=8"])
    assert "unknown option --num_generations: did you mean '--train.group'" in told
    assert "use `flowgrpo train sdxl_24gb`" in error_line(capsys, "demo", "sdxl_24gb")
    assert "unknown option --train.lrr: did you mean '--train.lr'?" in error_line(capsys, "demo", "--train.lrr=1")
    assert "train.lr: got 'fast'" in error_line(capsys, "demo", "--train.lr=fast")
    (tmp_path / "mine.yaml").write_text("extends: starter\n")
    assert main(["check", str(tmp_path / "mine.yaml")]) == 0
    assert "\nmodel " in capsys.readouterr().out
    assert main(["check", str(tmp_path / "none.yaml")]) == 2
    assert f"no recipe at {tmp_path / 'none.yaml'}: it does not exist" in capsys.readouterr().err
